//! Asking a connection to end, from any thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Context;

use futures_util::task::AtomicWaker;

/// The wish that a connection reads no further request.
#[derive(Default)]
pub struct Leave {
    asked: AtomicBool,
    reader: AtomicWaker,
}

impl Leave {
    /// Utters the wish. What the connection has in flight is finished and answered.
    pub fn ask(&self) {
        self.asked.store(true, Ordering::Release);
        self.reader.wake();
    }

    /// Whether it was uttered; if not, the task is woken when it is. For one task.
    pub fn is_asked(&self, context: &Context<'_>) -> bool {
        // Registered first: a wish between the two is seen by one of them.
        self.reader.register(context.waker());
        self.asked.load(Ordering::Acquire)
    }
}
