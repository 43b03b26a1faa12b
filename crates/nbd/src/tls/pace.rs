//! Limits the time that a loop spends on handshakes, because a signature may take milliseconds and
//! untrusted clients can start any number of handshakes.
//!
//! After each step with received bytes, the next one waits for four times the mean duration of a
//! step, so steps take about a quarter of the loop's time. The rest of the time is left for the
//! loop's guests and clients. Steps run in the order in which their bytes arrive.

use std::cell::RefCell;
use std::time::{Duration, Instant};

/// Handshakes get 1/`SHARE` of the loop's time.
const SHARE: u32 = 4;

/// Schedule of the handshake steps of a loop.
#[derive(Debug, Default)]
struct Pace {
    /// The duration of a step: a moving mean of the last steps.
    cost: Duration,
    /// When the next step may run.
    next: Option<Instant>,
}

impl Pace {
    fn took(&mut self, time: Duration) {
        self.cost = (self.cost * 7 + time) / 8;
    }

    /// How long a step that begins at `now` has to wait.
    fn wait(&mut self, now: Instant) -> Duration {
        let begin = self.next.map_or(now, |next| next.max(now));
        self.next = Some(begin + self.cost * SHARE);
        begin - now
    }
}

thread_local! {
    static PACE: RefCell<Pace> = RefCell::default();
}

/// Records how long a step on this thread's loop has taken.
pub(super) fn took(time: Duration) {
    PACE.with_borrow_mut(|pace| pace.took(time));
}

/// The time that a step on this thread's loop has to wait before it may run.
pub(super) fn wait() -> Duration {
    PACE.with_borrow_mut(|pace| pace.wait(Instant::now()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handshakes_take_a_quarter_of_the_time_however_many_there_are() {
        let mut pace = Pace::default();
        let step = Duration::from_millis(2);
        let mut now = Instant::now();
        (0..100).for_each(|_| pace.took(step));
        let first = now;
        let mut last = Duration::ZERO;
        for _ in 0..50 {
            let wait = pace.wait(now);
            assert!(wait >= last, "in the order in which they came");
            last = wait;
        }
        let mean = last / 49;
        assert!(mean >= step * SHARE * 9 / 10 && mean <= step * SHARE, "{mean:?}");
        // An idle loop owes nothing.
        now = first + Duration::from_secs(60);
        assert_eq!(pace.wait(now), Duration::ZERO);
    }
}
