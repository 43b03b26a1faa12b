//! Detects that another disk is an export of this disk: reads of the other disk arrive here.
//!
//! A probe changes no data. A disk without a probe executes one relaxed load for each read.

use std::sync::atomic::{AtomicBool, Ordering};

use blockhouse_core::ByteRange;
use parking_lot::Mutex;

/// The ranges whose reads the probe watches.
#[derive(Default)]
pub(crate) struct ReadProbes {
    is_any: AtomicBool,
    wanted: Mutex<Vec<(ByteRange, bool)>>,
}

/// Watches for reads of some ranges by the disk's exports, until this is dropped.
pub struct ReadProbe<'a>(&'a ReadProbes);

impl ReadProbes {
    /// Starts a probe for reads of exactly these ranges. A second probe replaces the ranges, and
    /// the drop of either one ends both.
    pub(crate) fn begin(&self, ranges: Vec<ByteRange>) -> ReadProbe<'_> {
        *self.wanted.lock() = ranges.into_iter().map(|range| (range, false)).collect();
        self.is_any.store(true, Ordering::SeqCst);
        ReadProbe(self)
    }

    /// Records that a read of `length` bytes at `offset` has begun.
    pub(crate) fn note(&self, offset: u64, length: u64) {
        if !self.is_any.load(Ordering::Relaxed) {
            return;
        }
        let mut wanted = self.wanted.lock();
        let same = |range: &ByteRange| (range.offset(), range.length()) == (offset, length);
        wanted.iter_mut().filter(|(range, _)| same(range)).for_each(|(_, seen)| *seen = true);
    }
}

impl ReadProbe<'_> {
    /// Whether each range was read.
    pub fn has_seen_all(&self) -> bool {
        self.0.wanted.lock().iter().all(|(_, seen)| *seen)
    }
}

impl Drop for ReadProbe<'_> {
    fn drop(&mut self) {
        self.0.is_any.store(false, Ordering::SeqCst);
    }
}
