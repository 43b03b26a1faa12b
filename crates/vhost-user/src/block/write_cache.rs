//! The write cache mode. The mode that is reported to the guest is applied to its writes, except
//! that all writes of a driver that cannot flush are durable.

use std::sync::atomic::{AtomicBool, Ordering};

use blockhouse_core::{Storage, WriteCache};
use blockhouse_disk::Disk;

/// The mode of the write cache: writeback (volatile) or writethrough.
pub struct WriteCacheMode {
    /// Whether the disk has no volatile cache, so that the mode is writethrough for every driver.
    forced_writethrough: bool,
    volatile: AtomicBool,
    /// Whether the driver flushes, or sets the mode.
    driver_flushes: AtomicBool,
}

impl WriteCacheMode {
    /// The mode of the disk, for a driver that flushes.
    pub fn of<S: Storage>(disk: &Disk<S>) -> Self {
        let volatile = disk.capabilities().write_cache == WriteCache::Volatile;
        let (volatile, driver_flushes) = (AtomicBool::new(volatile), AtomicBool::new(true));
        Self { forced_writethrough: !volatile.load(Ordering::Relaxed), volatile, driver_flushes }
    }

    /// The state that is reported to the guest.
    pub fn reported(&self) -> WriteCache {
        if self.volatile.load(Ordering::Acquire) { WriteCache::Volatile } else { WriteCache::None }
    }

    /// The effective mode: the reported mode, but writethrough for a driver that cannot flush.
    pub fn state(&self) -> WriteCache {
        if self.driver_flushes.load(Ordering::Acquire) { self.reported() } else { WriteCache::None }
    }

    /// Sets the state that the driver requested. A disk without a volatile cache keeps its state,
    /// and reports it.
    pub fn set(&self, cache: WriteCache) {
        let volatile = cache == WriteCache::Volatile && !self.forced_writethrough;
        self.volatile.store(volatile, Ordering::Release);
    }

    /// Whether the driver accepted a feature that makes it flush.
    pub fn driver_flushes(&self) -> DriverFlushes {
        if self.driver_flushes.load(Ordering::Acquire) {
            DriverFlushes::Yes
        } else {
            DriverFlushes::No
        }
    }

    /// Sets whether the driver accepted a feature that makes it flush.
    pub fn set_driver_flushes(&self, driver_flushes: DriverFlushes) {
        self.driver_flushes.store(driver_flushes == DriverFlushes::Yes, Ordering::Release);
    }
}

/// Whether a driver knows of a possible volatile write cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverFlushes {
    /// The driver flushes, or turns the cache off.
    Yes,
    /// The driver expects every write to be durable.
    No,
}
