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
    /// Words of memory for the redo log; 0 where none is needed, because no answered change is in
    /// this process alone. Less memory than this is enough for a log with fewer changes.
    pub fn redo_log_words(&self) -> usize {
        self.format().redo().map_or(0, |redo| redo.words())
    }

    /// Brings to the image what a process had answered that died with it open. `log` is the memory
    /// that this process had [attached](Self::attach_redo_log), on the same boot of the host.
    /// To be called when the image has its data file and its backing file, and before anything
    /// is changed, of one that was [opened for it](Self::open_before_replay).
    ///
    /// # Errors
    /// Errors of the storage, or `Corrupt`: the log is still good.
    pub async fn replay(&self, log: &dyn StateMemory) -> Result<Replay> {
        match self.format().redo() {
            Some(redo) => redo.replay(log).await,
            None => Ok(Replay::Nothing),
        }
    }

    /// Empties `log`, and notes there from now on what is changed and not yet on disk. To be called
    /// before anything is changed, and after [`replay`](Self::replay).
    pub fn attach_redo_log(&self, log: Arc<dyn StateMemory>) {
        if let Some(redo) = self.format().redo() {
            redo.attach(log);
        }
    }
}
