//! Finding out whether another disk is this one by another name: whether reads of that one arrive
//! here.
//!
//! Nothing is changed for it. A disk that is not probed pays one relaxed load for each read.

use std::sync::atomic::{AtomicBool, Ordering};

use blockhouse_core::ByteRange;
use parking_lot::Mutex;

/// The ranges that are looked for.
#[derive(Default)]
pub(crate) struct ReadProbes {
    is_any: AtomicBool,
    wanted: Mutex<Vec<(ByteRange, bool)>>,
}

/// Looks for reads of some ranges by the disk's exports, until it is dropped.
pub struct ReadProbe<'a>(&'a ReadProbes);

impl ReadProbes {
    /// Looks for reads of exactly these ranges from now on. One probe at a time: another one takes
    /// the place of this.
    pub(crate) fn begin(&self, ranges: Vec<ByteRange>) -> ReadProbe<'_> {
        *self.wanted.lock() = ranges.into_iter().map(|range| (range, false)).collect();
        self.is_any.store(true, Ordering::SeqCst);
        ReadProbe(self)
    }

    /// A read of `length` bytes from `offset` on has begun.
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
    /// Whether there was a read of each range.
    pub fn has_seen_all(&self) -> bool {
        self.0.wanted.lock().iter().all(|(_, seen)| *seen)
    }
}

impl Drop for ReadProbe<'_> {
    fn drop(&mut self) {
        self.0.is_any.store(false, Ordering::SeqCst);
    }
}
