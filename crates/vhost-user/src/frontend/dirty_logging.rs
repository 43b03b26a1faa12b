//! The log of changes of the guest's memory: whether it is enabled, and its memory.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use blockhouse_engine::VolatileSlice;

use super::eventfd::{check_eventfd, duplicate_call};
use super::memory::MemoryTable;
use crate::protocol::{LogDescription, Result};
use crate::queue::{Call, DirtyLog};

/// The dirty logging of a queue: the log if it is enabled, the guest's address of the used ring to
/// log, and the front-end's eventfd.
pub type QueueLog = (Option<DirtyLog>, Option<u64>, Option<Call>);

/// A front-end's dirty logging.
#[derive(Default)]
pub struct DirtyLogging {
    is_enabled: bool,
    log: Option<DirtyLog>,
    /// The log as the front-end described it.
    area: Option<(LogDescription, OwnedFd)>,
    /// The eventfd that notifies the front-end that the log has changed.
    call: Option<OwnedFd>,
}

impl DirtyLogging {
    /// Sets whether changes are logged (`VHOST_F_LOG_ALL`).
    pub fn set_enabled(&mut self, is_enabled: bool) {
        self.is_enabled = is_enabled;
    }

    /// Sets the log's memory.
    pub fn set_log(
        &mut self,
        given: LogDescription,
        file: OwnedFd,
        table: &MemoryTable,
    ) -> Result<()> {
        let memory = table.map(&file, given.offset, given.size, "the log")?;
        let length = memory.len();
        self.log = VolatileSlice::new(Arc::new(memory), 0, length).map(DirtyLog::new);
        self.area = Some((given, file));
        Ok(())
    }

    /// The description of the log, and its file, for another process.
    ///
    /// # Errors
    /// If no more descriptors are available.
    pub fn describe(&self) -> io::Result<Option<(LogDescription, OwnedFd)>> {
        let describe = |(given, file): &(_, OwnedFd)| Ok((*given, file.try_clone()?));
        self.area.as_ref().map(describe).transpose()
    }

    /// A duplicate of the eventfd that notifies the front-end that the log has changed.
    ///
    /// # Errors
    /// As [`describe`](Self::describe).
    pub fn duplicate_call(&self) -> io::Result<Option<OwnedFd>> {
        self.call.as_ref().map(OwnedFd::try_clone).transpose()
    }

    /// Sets the eventfd that notifies the front-end that the log has changed.
    pub fn set_call(&mut self, call: OwnedFd) -> Result<()> {
        check_eventfd(Some(&call), "the log's changes")?;
        self.call = Some(call);
        Ok(())
    }

    /// The log of a queue whose used ring is at this address.
    pub fn for_queue(&self, used: Option<u64>) -> QueueLog {
        let log = self.log.clone().filter(|_| self.is_enabled);
        (log, used, duplicate_call(self.call.as_ref()).ok().flatten())
    }
}
