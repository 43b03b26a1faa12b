//! The source of time for waits with a time limit.

use std::future::Future;
use std::pin::Pin;
use std::time::{Duration, Instant};

use super::sleep::sleep;

/// A future that completes when a time has passed.
pub type ClockSleep = Pin<Box<dyn Future<Output = ()>>>;

/// A clock with timers. The default is the clock of event loops. Tests and other executors have
/// their own.
pub trait Clock {
    /// Time since an arbitrary but fixed moment. Never goes back.
    fn now(&self) -> Duration;

    /// Completes when `time` has passed, or later. The calling task must poll it.
    fn sleep(&self, time: Duration) -> ClockSleep;
}

/// The monotonic clock, with the timers of the event loop that polls.
pub struct LoopClock(Instant);

impl LoopClock {
    /// A clock that begins at zero now.
    #[expect(clippy::new_without_default, reason = "no two clocks are the same")]
    pub fn new() -> Self {
        Self(Instant::now())
    }
}

impl Clock for LoopClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }

    fn sleep(&self, time: Duration) -> ClockSleep {
        Box::pin(sleep(time))
    }
}
