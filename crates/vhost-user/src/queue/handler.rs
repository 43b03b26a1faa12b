//! Handlers: long-lived tasks of a queue, each of which executes one request at a time.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use blockhouse_core::sync::LocalCondvar;

/// The state of a handler's task.
#[derive(Default)]
pub struct Handler {
    is_notified: Cell<bool>,
    notification: LocalCondvar,
}

impl Handler {
    /// Makes the handler try to pop a request.
    pub fn notify(&self) {
        self.is_notified.set(true);
        self.notification.notify();
    }

    /// Waits for the next notification.
    pub async fn notified(&self) {
        self.notification.wait_until(|| self.is_notified.take().then_some(())).await;
    }
}

/// The handlers of a queue, at most one for each request that may be in flight.
pub struct Handlers {
    idle: RefCell<Vec<Rc<Handler>>>,
    count: Cell<usize>,
    limit: usize,
}

/// The handler that executes the next request.
pub enum NextHandler {
    /// A handler that was idle.
    Idle(Rc<Handler>),
    /// A new handler, which the caller starts.
    New,
    /// All handlers are busy.
    None,
}

impl Handlers {
    /// A queue without handlers, which may get up to `limit`.
    pub fn new(limit: usize) -> Self {
        Self { idle: RefCell::default(), count: Cell::new(0), limit }
    }

    /// Whether a handler is idle or can be started.
    pub fn has_free(&self) -> bool {
        !self.idle.borrow().is_empty() || self.count.get() < self.limit
    }

    /// Takes an idle handler, or counts a new one.
    pub fn next(&self) -> NextHandler {
        match self.idle.borrow_mut().pop() {
            Some(handler) => NextHandler::Idle(handler),
            None if self.count.get() < self.limit => {
                self.count.update(|count| count + 1);
                NextHandler::New
            }
            None => NextHandler::None,
        }
    }

    /// Counts a handler as idle.
    pub fn push_idle(&self, handler: Rc<Handler>) {
        self.idle.borrow_mut().push(handler);
    }

    /// Notifies all idle handlers, at the end of the queue.
    pub fn notify_idle(&self) {
        self.idle.take().iter().for_each(|handler| handler.notify());
    }
}
