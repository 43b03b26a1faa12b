//! Where what waits for a time has it from.

use std::future::Future;
use std::pin::Pin;
use std::time::{Duration, Instant};

use super::sleep::sleep;

/// A future that completes when a time has passed.
pub type ClockSleep = Pin<Box<dyn Future<Output = ()>>>;

/// A clock, and waiting for it. The default is the one of event loops; tests and other executors
/// have their own.
pub trait Clock {
    /// Time since any moment that stays the same. Never goes back.
    fn now(&self) -> Duration;

    /// Completes when so much time has passed, or later. Polled by the task that called it.
    fn sleep(&self, time: Duration) -> ClockSleep;
}

/// The monotonic clock, and the timers of the event loop that polls.
pub struct LoopClock(Instant);

impl LoopClock {
    /// The clock.
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
