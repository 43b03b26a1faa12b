//! The format's redo log, in memory that survives a killed process.
//!
//! With this memory an image keeps every acknowledged change after its process is killed, even
//! unflushed ones: see [`StateMemory`]. Without it, or after a loss of power, the image keeps only
//! the changes acknowledged as durable.

use std::sync::Arc;

use blockhouse_core::{Result, StateMemory, Storage};
use blockhouse_format::Replay;

use super::Image;

impl<S: Storage> Image<S> {
    /// Words of memory for the redo log; 0 if none is needed, because every acknowledged change is
    /// already in the host's files. With less memory the log holds fewer changes.
    pub fn redo_log_words(&self) -> usize {
        self.format().redo().map_or(0, |redo| redo.words())
    }

    /// Replays the acknowledged changes of a killed process that had the image open. `log` is the
    /// memory that the killed process had [attached](Self::attach_redo_log) in the same boot of the
    /// host. The caller opens the image [for the replay](Self::open_before_replay), attaches its
    /// data file and its backing file, and replays before any change.
    ///
    /// # Errors
    /// Errors of the storage, or `Corrupt`. The log is unchanged then, and can be replayed again.
    pub async fn replay(&self, log: &dyn StateMemory) -> Result<Replay> {
        match self.format().redo() {
            Some(redo) => redo.replay(log).await,
            None => Ok(Replay::Nothing),
        }
    }

    /// Empties `log`, and then records the changes in it that are not yet on disk. The caller
    /// [replays](Self::replay) first, because the records of the killed process are lost here, and
    /// attaches before any change.
    pub fn attach_redo_log(&self, log: Arc<dyn StateMemory>) {
        if let Some(redo) = self.format().redo() {
            redo.attach(log);
        }
    }
}
