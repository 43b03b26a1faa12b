//! The progress of a tool: bytes that are done, of all.
//!
//! Guarantees: it is read from any thread, at any time, and it never goes back.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that a tool has processed, and their total. If a tool processes the same bytes several
/// times, as a repair checks before and after, [`in_passes`](Self::in_passes) gets the number.
#[derive(Debug)]
pub struct ToolProgress {
    passes: u64,
    begun: AtomicU64,
    done: AtomicU64,
    total: AtomicU64,
}

impl Default for ToolProgress {
    fn default() -> Self {
        Self::in_passes(1)
    }
}

impl ToolProgress {
    /// Of a tool that [begins](Self::begin) this many times.
    pub fn in_passes(passes: u64) -> Self {
        let zero = || AtomicU64::new(0);
        Self { passes: passes.max(1), begun: zero(), done: zero(), total: zero() }
    }

    /// Bytes that need no more work, and all of them; the latter is 0 if unknown, as before the
    /// tool has begun. Several parts are in flight together, so earlier ones may still be
    /// incomplete.
    pub fn get(&self) -> (u64, u64) {
        let total = self.total.load(Ordering::Relaxed);
        let done = self.done.load(Ordering::Relaxed);
        (if total > 0 { done.min(total) } else { done }, total)
    }

    /// A pass begins, which is about `bytes` long: that of the first counts for all of them.
    pub fn begin(&self, bytes: u64) {
        match self.begun.fetch_add(1, Ordering::Relaxed) {
            0 => self.total.store(bytes.saturating_mul(self.passes), Ordering::Relaxed),
            pass => {
                let each = self.total.load(Ordering::Relaxed) / self.passes;
                self.reach(each.saturating_mul(pass.min(self.passes)));
            }
        }
    }

    /// All work before `offset` is done.
    pub fn reach(&self, offset: u64) {
        self.done.fetch_max(offset, Ordering::Relaxed);
    }

    /// Counts bytes that are done.
    pub fn advance(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_share_the_whole_and_none_goes_back() {
        let progress = ToolProgress::in_passes(2);
        assert_eq!(progress.get(), (0, 0));
        progress.begin(100);
        progress.advance(70);
        assert_eq!(progress.get(), (70, 200));
        progress.begin(50);
        assert_eq!(progress.get(), (100, 200));
        progress.reach(90);
        progress.advance(500);
        assert_eq!(progress.get(), (200, 200));
    }
}
