//! A request on its way to the task that carries it out.

use std::cell::Cell;

use blockhouse_core::Buffer;

use super::condition::Condition;
use crate::command::Command;
use crate::proto::reply::ReplyTo;

/// A request for a lane.
pub struct Job {
    pub to: ReplyTo,
    pub command: Command,
    /// What a write stores.
    pub payload: Option<Buffer>,
}

/// Where the task of a lane waits.
#[derive(Default)]
pub struct Lane {
    job: Cell<Option<Job>>,
    over: Cell<bool>,
    changed: Condition,
}

impl Lane {
    /// Hands a request over. The lane has none.
    pub fn give(&self, job: Job) {
        self.job.set(Some(job));
        self.changed.notify();
    }

    /// Waits for the next request; `None` at the end of the connection.
    pub async fn next(&self) -> Option<Job> {
        self.changed
            .until(|| match self.job.take() {
                Some(job) => Some(Some(job)),
                None => self.over.get().then_some(None),
            })
            .await
    }

    /// Ends the lane, which has no request.
    pub fn end(&self) {
        self.over.set(true);
        self.changed.notify();
    }
}
