//! The server's requests to a connection, from any thread: to pause, or to shut down.

use std::sync::atomic::{AtomicU8, Ordering};
use std::task::Context;

use futures_util::task::AtomicWaker;

/// The reason why a connection reads no further requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Pause between two requests, or in the middle of a payload, until the connection is resumed
    /// here or by another process.
    Pause,
    /// End the connection.
    Shutdown,
}

const NONE: u8 = 0;
const PAUSE: u8 = 1;
const SHUTDOWN: u8 = 2;

/// Tells a connection to read no further request.
#[derive(Default)]
pub struct ShutdownSignal {
    requested: AtomicU8,
    waiter: AtomicWaker,
}

impl ShutdownSignal {
    /// Requests shutdown, for good. The reader stops; requests in flight complete and get their
    /// replies.
    pub fn request(&self) {
        self.requested.store(SHUTDOWN, Ordering::Release);
        self.waiter.wake();
    }

    /// Requests a pause, unless shutdown was requested.
    pub fn pause(&self) {
        self.change(NONE, PAUSE);
    }

    /// Withdraws the request to pause.
    pub fn resume(&self) {
        self.change(PAUSE, NONE);
    }

    fn change(&self, from: u8, to: u8) {
        // A state other than `from` is not changed, because a shutdown request is final.
        let _ = self.requested.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire);
        self.waiter.wake();
    }

    /// The current request, if any.
    pub fn get(&self) -> Option<Stop> {
        match self.requested.load(Ordering::Acquire) {
            PAUSE => Some(Stop::Pause),
            SHUTDOWN => Some(Stop::Shutdown),
            _ => None,
        }
    }

    /// The current request; the task is woken when it changes. Only one task can wait.
    pub fn poll(&self, context: &Context<'_>) -> Option<Stop> {
        // The waker is registered first, so that a request between the two steps is not missed.
        self.waiter.register(context.waker());
        self.get()
    }

    /// Whether shutdown was requested; the task is woken when the request changes. Only one task
    /// can wait.
    pub fn poll_requested(&self, context: &Context<'_>) -> bool {
        self.poll(context) == Some(Stop::Shutdown)
    }
}
