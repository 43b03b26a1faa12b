//! The pauses before repeated attempts: each is twice the last one, up to a limit.

use std::cell::Cell;
use std::time::Duration;

/// The pause after the first failure.
const FIRST_PAUSE: Duration = Duration::from_secs(10);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_mins(5);

/// Failures in a row.
#[derive(Default)]
pub(crate) struct Retry {
    /// The pause after the last failure; `None` if an operation has succeeded since.
    pause: Cell<Option<Duration>>,
    /// When the pause is over.
    end: Cell<Duration>,
}

impl Retry {
    /// Records a failure. Returns the length of the pause that begins now; `None` during a pause,
    /// which another failed operation in flight has begun.
    pub(crate) fn fail(&self, now: Duration) -> Option<Duration> {
        if self.wait(now).is_some() {
            return None;
        }
        let pause = self.pause.get().map_or(FIRST_PAUSE, |last| LONGEST_PAUSE.min(last * 2));
        self.pause.set(Some(pause));
        self.end.set(now + pause);
        Some(pause)
    }

    /// Records a success. During a pause it does not count, because the operation began before the
    /// pause.
    pub(crate) fn succeed(&self, now: Duration) {
        if self.wait(now).is_none() {
            self.pause.set(None);
        }
    }

    /// The remaining time of the pause; `None` outside of a pause.
    pub(crate) fn wait(&self, now: Duration) -> Option<Duration> {
        self.pause.get()?;
        self.end.get().checked_sub(now).filter(|wait| !wait.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_until_something_succeeds() {
        let (retry, seconds) = (Retry::default(), Duration::from_secs);
        assert_eq!(retry.wait(seconds(0)), None);
        assert_eq!(retry.fail(seconds(1)), Some(seconds(10)));
        assert_eq!(retry.fail(seconds(2)), None, "it was in flight with the other one");
        assert_eq!(retry.wait(seconds(2)), Some(seconds(9)));
        retry.succeed(seconds(3));
        assert_eq!(retry.wait(seconds(11)), None);
        assert_eq!(retry.fail(seconds(11)), Some(seconds(20)));
        assert_eq!(retry.fail(seconds(31)), Some(seconds(40)));
        retry.succeed(seconds(71));
        assert_eq!(retry.fail(seconds(72)), Some(seconds(10)));
        let mut now = seconds(82);
        for _ in 0..10 {
            now += retry.fail(now).expect("no pause goes on");
        }
        assert_eq!(retry.fail(now), Some(LONGEST_PAUSE));
    }
}
