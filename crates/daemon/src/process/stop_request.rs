//! A request to stop, made by a signal, and the rule for when another signal is a second request.
//!
//! One request often comes as several signals: `timeout` signals its child and then its whole
//! process group, and a terminal's Ctrl-C reaches a process that a wrapper signals as well. So
//! signals within one second of the first are the same request.

use std::time::{Duration, Instant};

/// For how long after the first signal other signals are the same request.
const SAME_REQUEST: Duration = Duration::from_secs(1);

/// The first request to stop.
#[derive(Clone, Copy, Debug)]
pub struct StopRequest(Instant);

impl StopRequest {
    /// A request whose first signal came at `time`.
    pub fn at(time: Instant) -> Self {
        Self(time)
    }

    /// Whether a signal that came at `time` repeats this request. Otherwise it is a second one,
    /// which means "quit at once".
    pub fn is_repeated_at(self, time: Instant) -> bool {
        time.saturating_duration_since(self.0) < SAME_REQUEST
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_within_a_second_are_one_request() {
        let start = Instant::now();
        let request = StopRequest::at(start);
        let after =
            |milliseconds| request.is_repeated_at(start + Duration::from_millis(milliseconds));
        assert_eq!([0, 1, 999, 1000, 1001].map(after), [true, true, true, false, false]);
    }
}
