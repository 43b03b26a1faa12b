//! How long a request waits for a server that keeps the connection and does not answer.
//!
//! A guest's request waits without a limit, because the server may recover. Opening and closing an
//! image have a limit, because a person or a program waits for them. Only a complete answer ends
//! the wait: a server could send parts of an answer, or keep-alives, without end.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use blockhouse_core::sync::Condvar;
use blockhouse_core::{Error, ErrorKind, Result};
use blockhouse_engine::timeout;
use futures_util::future::{Either, select};

/// The limit of the wait for an answer.
#[derive(Default)]
pub(super) struct AnswerTime {
    /// The limit in milliseconds; 0 is no limit.
    limit: AtomicU64,
    changed: Condvar,
}

impl AnswerTime {
    /// Sets the limit, also for flushes in flight. `None` removes the limit.
    pub(super) fn set(&self, limit: Option<Duration>) {
        let millis = limit.map_or(0, |limit| limit.as_millis().max(1) as u64);
        self.limit.store(millis, Ordering::Relaxed);
        self.changed.notify_all();
    }

    fn get(&self) -> Option<Duration> {
        let millis = self.limit.load(Ordering::Relaxed);
        (millis > 0).then(|| Duration::from_millis(millis))
    }

    /// Waits for an answer.
    ///
    /// # Errors
    /// The answer's error, or an error if no answer comes within the limit. `name` is the name of
    /// the export, for messages.
    pub(super) async fn wait<T>(
        &self,
        name: &str,
        answer: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        match self.get() {
            Some(limit) => within(limit, name, answer).await,
            None => answer.await,
        }
    }

    /// As [`wait`](Self::wait). If a limit is set during the wait, the time is measured from that
    /// moment.
    pub(super) async fn wait_for_sync(
        &self,
        name: &str,
        answer: impl Future<Output = Result<()>>,
    ) -> Result<()> {
        let (answer, limited) = (pin!(answer), pin!(self.changed.wait_until(|| self.get())));
        match select(answer, limited).await {
            Either::Left((outcome, _)) => outcome,
            Either::Right((limit, answer)) => within(limit, name, answer).await,
        }
    }
}

async fn within<T>(
    limit: Duration,
    name: &str,
    answer: impl Future<Output = Result<T>>,
) -> Result<T> {
    let unanswered = || {
        let what = format!("the server keeps the connection, and has not answered for {limit:?}");
        let error = Error::new(ErrorKind::Io, what).on(name);
        Err(error.hint("see whether the server hangs"))
    };
    timeout(limit, answer).await.unwrap_or_else(unanswered)
}
