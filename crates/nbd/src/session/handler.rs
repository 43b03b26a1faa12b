//! Handlers: long-lived tasks, each of which executes one request at a time.
//!
//! A connection has at most as many handlers as it may have requests in flight. A handler is
//! started when it is first needed and runs until the connection ends, so a request needs no task
//! and no allocation of its own.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use blockhouse_core::Buffer;
use blockhouse_core::sync::LocalCondvar;

use super::in_flight::Permit;
use crate::command::Command;
use crate::proto::reply::ReplyTo;

/// A request for a handler.
pub struct Job {
    /// The request's share of the limits.
    pub permit: Permit,
    /// The identity of the client's request, for the reply.
    pub to: ReplyTo,
    /// The request's command.
    pub command: Command,
    /// The payload of a write.
    pub payload: Option<Buffer>,
}

/// The state of a handler's task.
#[derive(Default)]
pub struct Handler {
    job: Cell<Option<Job>>,
    is_ended: Cell<bool>,
    changed: LocalCondvar,
}

impl Handler {
    /// Gives a request to this idle handler.
    pub fn give(&self, job: Job) {
        self.job.set(Some(job));
        self.changed.notify();
    }

    /// Waits for the next request; `None` at the end of the connection.
    pub async fn next(&self) -> Option<Job> {
        self.changed
            .wait_until(|| match self.job.take() {
                Some(job) => Some(Some(job)),
                None => self.is_ended.get().then_some(None),
            })
            .await
    }

    fn end(&self) {
        self.is_ended.set(true);
        self.changed.notify();
    }
}

/// The handlers of a connection that have no request.
#[derive(Default)]
pub struct IdleHandlers(RefCell<Vec<Rc<Handler>>>);

impl IdleHandlers {
    /// Removes the handler that was busy last.
    pub fn pop(&self) -> Option<Rc<Handler>> {
        self.0.borrow_mut().pop()
    }

    /// Puts back a handler that has no request.
    pub fn push(&self, handler: Rc<Handler>) {
        self.0.borrow_mut().push(handler);
    }

    /// Ends the tasks of all idle handlers.
    pub fn end(&self) {
        self.0.take().iter().for_each(|handler| handler.end());
    }
}
