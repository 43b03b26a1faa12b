//! The request to a connection to shut down, from any thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Context;

use futures_util::task::AtomicWaker;

/// Asks a connection to read no further request.
#[derive(Default)]
pub struct ShutdownSignal {
    is_requested: AtomicBool,
    waiter: AtomicWaker,
}

impl ShutdownSignal {
    /// Requests shutdown. The reader stops; requests in flight complete and get their replies.
    pub fn request(&self) {
        self.is_requested.store(true, Ordering::Release);
        self.waiter.wake();
    }

    /// Whether shutdown was requested; otherwise the task is woken when it is. For one task.
    pub fn poll_requested(&self, context: &Context<'_>) -> bool {
        // The waker is registered first, so that a request between the two steps is not missed.
        self.waiter.register(context.waker());
        self.is_requested.load(Ordering::Acquire)
    }
}
