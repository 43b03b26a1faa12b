//! The redo log of the format, in memory that a killed process leaves to the next one.
//!
//! With this memory an image keeps every acknowledged request, even those that were not flushed:
//! see [`StateMemory`]. Without it, or after a loss of power, it keeps those acknowledged as
//! durable.

use std::sync::Arc;

use blockhouse_core::{Result, StateMemory, Storage};
use blockhouse_format::Replay;

use super::Image;

impl<S: Storage> Image<S> {
    /// Words of memory for the redo log; 0 if none is needed, because every answered change is
    /// already in the host's files. Less memory than this is enough for a log with fewer changes.
    pub fn redo_log_words(&self) -> usize {
        self.format().redo().map_or(0, |redo| redo.words())
    }

    /// Replays the answered changes of a killed process that had the image open. `log` is the
    /// memory that this process had [attached](Self::attach_redo_log), on the same boot of the
    /// host. To be called when the image has its data file and its backing file, before any change;
    /// the image must be [opened for it](Self::open_before_replay).
    ///
    /// # Errors
    /// Errors of the storage, or `Corrupt`: the log is still good.
    pub async fn replay(&self, log: &dyn StateMemory) -> Result<Replay> {
        match self.format().redo() {
            Some(redo) => redo.replay(log).await,
            None => Ok(Replay::Nothing),
        }
    }

    /// Empties `log`, and from now on records there the changes that are not yet on disk. To be
    /// called before any change, and after [`replay`](Self::replay).
    pub fn attach_redo_log(&self, log: Arc<dyn StateMemory>) {
        if let Some(redo) = self.format().redo() {
            redo.attach(log);
        }
    }
}
