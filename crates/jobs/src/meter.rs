//! The progress of a copy: bytes, speed, and whether the guest changes more than is copied.

use std::time::Duration;

use crate::control::JobProgress;

/// The time over which the rate is measured.
const WINDOW: Duration = Duration::from_millis(500);

/// See the module's page.
#[derive(Default)]
pub(crate) struct Meter {
    copied: u64,
    rate: u64,
    is_losing: bool,
    since: Duration,
    /// The copied bytes and the rest when the window began.
    copied_before: u64,
    left_before: Option<u64>,
}

impl Meter {
    /// `written` bytes were copied; `left` bytes are left.
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

    /// Whether the remaining bytes decreased by less than half of those copied lately: the guest
    /// changed the rest.
    pub(crate) fn is_losing(&self) -> bool {
        self.is_losing
    }

    /// The figures for users.
    pub(crate) fn progress(&self, remaining: u64) -> JobProgress {
        let total = self.copied + remaining;
        JobProgress { copied: self.copied, remaining, total, rate: self.rate }
    }
}
