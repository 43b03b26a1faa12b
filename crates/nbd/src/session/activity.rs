//! Whether a connection is busy, or since when it has been idle; other threads read this.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// The number of requests that a connection has in flight, and the time since which it has had
/// none.
///
/// The connection's own thread writes this with plain stores, so a request needs no additional
/// system call and no locked instruction. Other threads read it if the maximum number of
/// connections is reached.
pub struct Activity {
    in_flight: AtomicUsize,
    /// When the last request completed, or else when the connection began, in milliseconds of
    /// [`now`].
    idle_since: AtomicU64,
    began: u64,
}

impl Activity {
    /// A connection that has sent no request yet.
    pub fn new() -> Self {
        let began = now();
        Self { in_flight: AtomicUsize::new(0), idle_since: AtomicU64::new(began), began }
    }

    /// A connection without requests in flight, whose client has sent requests to another process
    /// before.
    pub fn of_used() -> Self {
        let activity = Self::new();
        activity.set_in_flight(0);
        activity
    }

    /// Sets how many requests are in flight.
    pub fn set_in_flight(&self, count: usize) {
        if count == 0 {
            // The time is after `began`, even within one tick of the clock, because `is_unused`
            // compares the two.
            self.idle_since.store(now().max(self.began + 1), Ordering::Relaxed);
        }
        self.in_flight.store(count, Ordering::Release);
    }

    /// Whether no request was received since the connection began.
    pub fn is_unused(&self) -> bool {
        self.in_flight.load(Ordering::Relaxed) == 0
            && self.idle_since.load(Ordering::Relaxed) == self.began
    }

    /// The time for which no request has been in flight; `None` while one is in flight.
    pub fn idle(&self) -> Option<Duration> {
        // The time is read last: before that it may be of the request before one in flight.
        let is_idle = self.in_flight.load(Ordering::Acquire) == 0;
        is_idle.then(|| {
            let since = self.idle_since.load(Ordering::Relaxed);
            Duration::from_millis(now().saturating_sub(since))
        })
    }
}

/// Milliseconds of `CLOCK_MONOTONIC_COARSE`, which is read without a system call and advances with
/// the kernel's ticks.
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
