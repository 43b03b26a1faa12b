//! How far a tool has come that goes through a disk from its start to its end.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of the disk that a tool has passed. Read from any thread, at any time; it never goes back.
#[derive(Debug, Default)]
pub struct ToolProgress {
    done: AtomicU64,
    total: AtomicU64,
}

impl ToolProgress {
    /// Bytes that need no more work, and the size of the disk; both are 0 before the tool has begun. Several chunks are
    /// in flight together, so some before the last one may still be.
    pub fn get(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed))
    }

    pub(super) fn begin(&self, total: u64) {
        self.total.store(total, Ordering::Relaxed);
    }

    /// What lies before `offset` is done.
    pub(super) fn reach(&self, offset: u64) {
        self.done.fetch_max(offset, Ordering::Relaxed);
    }
}
