//! A front-end's memory for in-flight tracking: one part for each queue, and one for the device.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use blockhouse_core::WriteCache;
use blockhouse_engine::{SharedMemory, VolatileSlice};

use super::memory::MemoryTable;
use crate::protocol::{InflightDescription, Result, refused};
use crate::queue::inflight::{self, InflightQueue, Recovery};
use crate::ring::MAX_ENTRIES;

/// Maximum number of queues with in-flight tracking.
const MAX_QUEUES: u16 = 1024;

/// The mapped memory.
pub struct InflightArea {
    memory: Arc<SharedMemory>,
    given: InflightDescription,
    /// The memory's file, for a process that continues the device.
    file: OwnedFd,
    /// The device's part; `None` if another implementation made the memory.
    device: Option<VolatileSlice>,
}

impl InflightArea {
    /// Allocates new memory, which the front-end keeps.
    pub fn create(wanted: &InflightDescription) -> Result<(InflightDescription, OwnedFd)> {
        check(wanted)?;
        let InflightDescription { queues, entries, .. } = *wanted;
        let size = inflight::size(queues, entries) as u64;
        let file = inflight::new_file(size)
            .map_err(|error| refused(format_args!("no memory for in-flight tracking: {error}")))?;
        Ok((InflightDescription { size, offset: 0, queues, entries }, file))
    }

    /// Maps memory that the front-end has kept.
    pub fn map(given: InflightDescription, file: OwnedFd, table: &MemoryTable) -> Result<Self> {
        check(&given)?;
        let InflightDescription { size, offset, queues, entries } = given;
        let memory = Arc::new(table.map(&file, offset, size, "in-flight tracking")?);
        let device = inflight::device(&memory, queues, entries);
        Ok(Self { memory, given, file, device })
    }

    /// The description of the memory, and its file, for another process.
    ///
    /// # Errors
    /// If no more descriptors are available.
    pub fn describe(&self) -> io::Result<(InflightDescription, OwnedFd)> {
        Ok((self.given, self.file.try_clone()?))
    }

    /// The memory.
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// The in-flight log of a queue of `size` entries, whose next used entry is number `used`.
    /// `None` if the memory has no part for the queue.
    pub fn open_queue(
        &self,
        index: usize,
        size: u16,
        used: u16,
    ) -> Option<(InflightQueue, Recovery)> {
        let entries = self.given.entries;
        let part = inflight::queue(&self.memory, index as u16, entries)?;
        InflightQueue::open(part, entries.max(size), used)
    }

    /// The state of the write cache that an earlier server stored; `None` if no server stored one.
    pub fn write_cache(&self) -> Option<WriteCache> {
        self.device.as_ref().and_then(inflight::write_cache)
    }

    /// Stores the state of the write cache for the next server.
    pub fn keep_write_cache(&self, cache: WriteCache) {
        if let Some(device) = &self.device {
            inflight::keep_write_cache(device, cache);
        }
    }
}

fn check(wanted: &InflightDescription) -> Result<()> {
    let InflightDescription { queues, entries, .. } = *wanted;
    if !(1..=MAX_QUEUES).contains(&queues) || !(1..=MAX_ENTRIES).contains(&entries) {
        return Err(refused(format_args!("{queues} queues of {entries} entries")));
    }
    Ok(())
}
