//! A counter that one thread advances and any thread reads.

use std::sync::atomic::{AtomicU64, Ordering};

/// A counter of one thread's block, see [`PerThread`](super::PerThread). [`add`](Self::add) is a
/// load and a store, so counts are lost if two threads add to one counter.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// A counter at 0.
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Adds `count`. Wraps at 2^64.
    pub fn add(&self, count: u64) {
        let before = self.0.load(Ordering::Relaxed);
        self.0.store(before.wrapping_add(count), Ordering::Relaxed);
    }

    /// The count so far.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
