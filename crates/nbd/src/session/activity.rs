//! Whether a connection is busy, or since when it has been idle; other threads read this.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// How many requests a connection has in flight, and since when it has none.
///
/// Written by the connection's own thread with plain stores: it costs a request no system call and
/// no locked instruction. Read when connections are short or an idle limit is set.
pub struct Activity {
    in_flight: AtomicUsize,
    /// When the last request left, or the connection began: milliseconds of [`now`].
    idle_since: AtomicU64,
    began: u64,
}

impl Activity {
    /// A connection that has sent no request yet.
    pub fn new() -> Self {
        let began = now();
        Self { in_flight: AtomicUsize::new(0), idle_since: AtomicU64::new(began), began }
    }

    /// A connection that has none in flight, and has sent some to another process.
    pub fn of_used() -> Self {
        let activity = Self::new();
        activity.set_in_flight(0);
        activity
    }

    /// Sets how many requests are in flight.
    pub fn set_in_flight(&self, count: usize) {
        if count == 0 {
            // Later than the beginning, also within one tick of the clock: a request came.
            self.idle_since.store(now().max(self.began + 1), Relaxed);
        }
        self.in_flight.store(count, Relaxed);
    }

    /// Whether no request was received since the connection began.
    pub fn is_unused(&self) -> bool {
        self.in_flight.load(Relaxed) == 0 && self.idle_since.load(Relaxed) == self.began
    }

    /// For how long nothing has been in flight; `None` while a request is.
    pub fn idle(&self) -> Option<Duration> {
        let since = self.idle_since.load(Relaxed);
        let is_idle = self.in_flight.load(Relaxed) == 0;
        is_idle.then(|| Duration::from_millis(now().saturating_sub(since)))
    }
}

/// Milliseconds of the kernel's cheapest clock, which is read without a system call and moves with
/// its ticks.
fn now() -> u64 {
    let time = clock_gettime(ClockId::MonotonicCoarse);
    time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_is_unused_until_its_first_request_and_idle_after_each() {
        let activity = Activity::new();
        assert!(activity.is_unused() && activity.idle().is_some());
        activity.set_in_flight(1);
        assert!(!activity.is_unused() && activity.idle().is_none());
        activity.set_in_flight(0);
        assert!(!activity.is_unused() && activity.idle() < Some(Duration::from_secs(5)));
    }
}
