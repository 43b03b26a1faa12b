//! The server's requests to a connection, from any thread: to pause, or to shut down.

use std::sync::atomic::{AtomicU8, Ordering};
use std::task::Context;

use futures_util::task::AtomicWaker;

/// The step of a connection instead of reading further requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// To pause between two requests, or in the middle of a payload, until it is resumed or handed
    /// over.
    Pause,
    /// To end.
    Shutdown,
}

const NONE: u8 = 0;
const PAUSE: u8 = 1;
const SHUTDOWN: u8 = 2;

/// Asks a connection to read no further request.
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

    /// Requests no pause.
    pub fn resume(&self) {
        self.change(PAUSE, NONE);
    }

    fn change(&self, from: u8, to: u8) {
        // Anything else stays as it is.
        let _ = self.requested.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire);
        self.waiter.wake();
    }

    /// The request.
    pub fn get(&self) -> Option<Stop> {
        match self.requested.load(Ordering::Acquire) {
            PAUSE => Some(Stop::Pause),
            SHUTDOWN => Some(Stop::Shutdown),
            _ => None,
        }
    }

    /// The request; the task is woken when it changes. For one task.
    pub fn poll(&self, context: &Context<'_>) -> Option<Stop> {
        // The waker is registered first, so that a request between the two steps is not missed.
        self.waiter.register(context.waker());
        self.get()
    }

    /// Whether shutdown was requested; otherwise the task is woken when it is. For one task.
    pub fn poll_requested(&self, context: &Context<'_>) -> bool {
        self.poll(context) == Some(Stop::Shutdown)
    }
}
