//! The progress of a copy: bytes, rate, and whether the remaining bytes hardly decrease.

use std::time::Duration;

use crate::control::JobProgress;

/// The minimum time over which the rate is measured.
const WINDOW: Duration = Duration::from_millis(500);

/// See the module's page.
#[derive(Default)]
pub(crate) struct Meter {
    copied: u64,
    rate: u64,
    is_losing: bool,
    since: Duration,
    /// The copied bytes when the window began; `left_before` has the remaining bytes.
    copied_before: u64,
    left_before: Option<u64>,
}

impl Meter {
    /// Counts `written` bytes that were copied; `left` bytes remain.
    pub(crate) fn count(&mut self, now: Duration, written: u64, left: u64) {
        self.copied += written;
        let Some(left_before) = self.left_before else {
            (self.since, self.left_before) = (now, Some(left));
            return;
        };
        let time = now.saturating_sub(self.since);
        if time < WINDOW {
            return;
        }
        let copied = self.copied - self.copied_before;
        self.rate = (copied as f64 / time.as_secs_f64()) as u64;
        self.is_losing = left_before.saturating_sub(left) < copied / 2;
        (self.since, self.copied_before, self.left_before) = (now, self.copied, Some(left));
    }

    /// Whether, in the last window, the remaining bytes decreased by less than half of the copied
    /// bytes, because the guest changed others.
    pub(crate) fn is_losing(&self) -> bool {
        self.is_losing
    }

    /// The figures for users.
    pub(crate) fn progress(&self, remaining: u64) -> JobProgress {
        let total = self.copied + remaining;
        JobProgress { copied: self.copied, remaining, total, rate: self.rate }
    }
}
