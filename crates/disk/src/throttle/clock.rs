//! Where the time of limits comes from.

use std::future::Future;
use std::pin::Pin;
use std::time::{Duration, Instant};

use blockhouse_engine::sleep;

/// A future that completes when a time has passed.
pub type ThrottleSleep = Pin<Box<dyn Future<Output = ()>>>;

/// A clock, and waiting for it. That of event loops is the usual one; tests and other executors
/// bring their own.
pub trait ThrottleClock: Send + Sync {
    /// Time since any moment that stays the same. Never goes back.
    fn now(&self) -> Duration;

    /// Completes when so much time has passed, or later. Polled by the task that called it.
    fn sleep(&self, time: Duration) -> ThrottleSleep;
}

/// The monotonic clock, and the timers of the event loop that polls.
pub(super) struct LoopClock(Instant);

impl LoopClock {
    pub(super) fn new() -> Self {
        Self(Instant::now())
    }
}

impl ThrottleClock for LoopClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }

    fn sleep(&self, time: Duration) -> ThrottleSleep {
        Box::pin(sleep(time))
    }
}
