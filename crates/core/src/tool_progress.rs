//! The progress of a tool: bytes done, and bytes in total.
//!
//! Guarantees: any thread can read it at any time, and it never decreases.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that a tool has processed, and their total. If a tool processes the same bytes several
/// times (a repair checks before and after), [`in_passes`](Self::in_passes) takes the number of
/// passes.
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
    /// The progress of a tool that calls [`begin`](Self::begin) this many times.
    pub fn in_passes(passes: u64) -> Self {
        let zero = || AtomicU64::new(0);
        Self { passes: passes.max(1), begun: zero(), done: zero(), total: zero() }
    }

    /// Bytes that need no more work, and bytes in total. The total is 0 if unknown, for example
    /// before the tool has begun. Several parts are processed at once, so parts before the reported
    /// position may still be incomplete.
    pub fn get(&self) -> (u64, u64) {
        let total = self.total.load(Ordering::Relaxed);
        let done = self.done.load(Ordering::Relaxed);
        (if total > 0 { done.min(total) } else { done }, total)
    }

    /// Begins a pass of about `bytes` bytes. The length of the first pass counts for all passes.
    pub fn begin(&self, bytes: u64) {
        match self.begun.fetch_add(1, Ordering::Relaxed) {
            0 => self.total.store(bytes.saturating_mul(self.passes), Ordering::Relaxed),
            pass => {
                let each = self.total.load(Ordering::Relaxed) / self.passes;
                self.reach(each.saturating_mul(pass.min(self.passes)));
            }
        }
    }

    /// Records that all work before `offset` is done.
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
