//! The requests of a connection. Any thread can begin a request; tasks on one loop send the
//! requests and receive the replies.
//!
//! Guarantee: each request ends, with its reply or with the error that ended the connection.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use blockhouse_core::sync::Condvar;
use blockhouse_core::{Error, ErrorKind, IoVector, Result};
use blockhouse_nbd_protocol::request::{RequestHeader, kind};
use blockhouse_nbd_protocol::{CommandFlags, Framing};
use parking_lot::Mutex;

use super::dial::Dial;
use super::pending::{BlockStatus, Body, MAX_ENDED_STREAMS, Pending};
use super::unflushed::{StreamGuard, UnflushedWrites};
use crate::detached::DetachedSyncs;

/// The command of a caller.
pub(super) struct Command {
    pub(super) kind: u16,
    pub(super) flags: CommandFlags,
    pub(super) offset: u64,
    pub(super) length: u64,
    pub(super) body: Body,
}

/// The requests of a connection.
pub(super) struct Transmission {
    dial: Arc<Dial>,
    detached: Arc<DetachedSyncs>,
    unflushed: Arc<UnflushedWrites>,
    /// The index of this connection in the storage's list.
    number: usize,
    state: Mutex<State>,
    /// Notified when a request was queued or the stream has ended.
    changed: Condvar,
}

struct State {
    pending: Pending,
    /// The reason why the stream has ended.
    link_failure: Option<Error>,
    /// The error with which requests fail at once, because the server could not be reached within
    /// the reconnect time. `None`: requests wait.
    outage: Option<Error>,
    is_closing: bool,
    /// Whether the connection has ended for good, so that no further request is sent.
    is_over: bool,
    /// Whether the loop that served the connection has ended.
    has_no_loop: bool,
    /// Whether there is a stream to send requests over. Without one they wait for the reconnect.
    has_stream: bool,
}

impl Transmission {
    /// A connection without requests.
    pub(super) fn new(
        dial: Arc<Dial>,
        detached: Arc<DetachedSyncs>,
        unflushed: Arc<UnflushedWrites>,
        number: usize,
    ) -> Self {
        let state = State {
            pending: Pending::new(Arc::clone(&unflushed)),
            link_failure: None,
            outage: None,
            is_closing: false,
            is_over: false,
            has_no_loop: false,
            has_stream: true,
        };
        let state = Mutex::new(state);
        Self { dial, detached, unflushed, number, state, changed: Condvar::new() }
    }

    /// How the export is reached.
    pub(super) fn dial(&self) -> &Dial {
        &self.dial
    }

    /// Records a new stream, over which nothing was sent yet.
    pub(super) fn begin_stream(&self) -> StreamGuard {
        self.state.lock().has_stream = true;
        self.unflushed.begin_stream(self.number)
    }

    /// Takes the reason why the stream has ended; after that, requests may be sent over another
    /// stream.
    pub(super) fn take_link_failure(&self) -> Error {
        let failure = self.state.lock().link_failure.take();
        failure.unwrap_or_else(|| self.dial.error("the connection has ended"))
    }

    /// Whether requests wait, and none was answered over the last stream.
    pub(super) fn is_stuck(&self) -> bool {
        self.state.lock().pending.is_stuck()
    }

    /// Queues all requests without a reply for a new stream. One that has ended too many fails.
    pub(super) fn queue_again(&self) {
        let mut state = self.state.lock();
        state.outage = None;
        state.pending.queue_again();
        let error = |request: &RequestHeader| {
            let what = format!(
                "{MAX_ENDED_STREAMS} connections, which answered other requests, and one without \
                 others ended before the reply to command {} for {} bytes",
                request.kind, request.length
            );
            let error = Error::new(ErrorKind::Io, what).on(self.dial.name()).at(request.offset);
            let error = error.hint("see in the server's log why it ends them");
            tracing::error!("{error}");
            error
        };
        let waker = state.pending.fail_suspect(error, &self.detached);
        drop(state);
        waker.into_iter().for_each(Waker::wake);
    }

    pub(super) fn framing(&self) -> Framing {
        self.dial.export().framing
    }

    /// The name of the export, for messages.
    pub(super) fn name(&self) -> &str {
        self.dial.name()
    }

    pub(super) fn host_error(&self, error: std::io::Error) -> Error {
        Error::host("the connection has failed", error).on(self.dial.name())
    }

    /// Begins a request.
    pub(super) fn submit(self: &Arc<Self>, command: Command) -> Submitted {
        let Command { kind, flags, offset, length, body } = command;
        let is_sync = kind == kind::FLUSH || flags.contains(CommandFlags::FUA);
        let mut state = self.state.lock();
        if let Some(outage) = &state.outage {
            return Submitted { transmission: None, result: Err(outage.duplicate()) };
        }
        let header = RequestHeader { flags, kind, cookie: 0, offset, length };
        let cookie = state.pending.insert(header, body, is_sync);
        drop(state);
        self.changed.notify_all();
        Submitted { transmission: Some(Arc::clone(self)), result: Ok(cookie) }
    }

    /// Waits for queued requests, and takes at most `limit` of them to send. `false` if the stream
    /// has ended, or if the connection is being closed and no request is queued.
    pub(super) async fn next_requests(
        &self,
        requests: &mut Vec<(RequestHeader, Option<IoVector>)>,
        limit: usize,
    ) -> bool {
        self.changed
            .wait_until(|| {
                let mut state = self.state.lock();
                if state.link_failure.is_some() {
                    return Some(false);
                }
                if state.pending.is_queue_empty() {
                    return state.is_closing.then_some(false);
                }
                if state.pending.is_held_back() {
                    return None;
                }
                while requests.len() < limit
                    && let Some(request) = state.pending.next_queued()
                {
                    requests.push(request);
                }
                Some(true)
            })
            .await
    }

    /// Returns a payload to its request after it was sent.
    pub(super) fn give_back(&self, cookie: u64, payload: IoVector) {
        let waker =
            self.with_pending(|pending, detached| pending.give_back(cookie, payload, detached));
        waker.into_iter().for_each(Waker::wake);
    }

    /// Applies a step of a reply to the requests in flight.
    pub(super) fn with_pending<T>(
        &self,
        step: impl FnOnce(&mut Pending, &DetachedSyncs) -> T,
    ) -> T {
        let mut state = self.state.lock();
        let was_held_back = state.pending.is_held_back();
        let outcome = step(&mut state.pending, &self.detached);
        let goes_on = was_held_back && !state.pending.is_held_back();
        drop(state);
        if goes_on {
            self.changed.notify_all();
        }
        outcome
    }

    /// Records that the stream has failed, which ends the reader and the writer.
    pub(super) fn link_failed(&self, error: Error) {
        let mut state = self.state.lock();
        state.link_failure.get_or_insert(error);
        state.has_stream = false;
        drop(state);
        self.changed.notify_all();
    }

    /// Fails all present and future requests with `error`: for good if `is_final`, otherwise until
    /// there is another stream.
    pub(super) fn fail_all(&self, error: Error, is_final: bool) {
        let error = error.of_lost_storage();
        let mut state = self.state.lock();
        let wakers = state.pending.fail_all(&error, &self.detached);
        state.outage = Some(error);
        state.is_over |= is_final;
        drop(state);
        if is_final && !self.is_closing() {
            tracing::error!("{}: every request fails from now on", self.dial.name());
        }
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Records that the loop of this connection has ended. All requests fail, unless the connection
    /// had ended for good before.
    pub(super) fn loop_ended(&self) {
        let mut state = self.state.lock();
        if state.is_over {
            return;
        }
        (state.has_no_loop, state.has_stream) = (true, false);
        drop(state);
        self.fail_all(self.dial.error("the thread of the connection has ended"), false);
    }

    /// Whether the loop that served the connection has ended.
    pub(super) fn has_no_loop(&self) -> bool {
        self.state.lock().has_no_loop
    }

    /// Whether requests are sent at once, and do not wait for a reconnect.
    pub(super) fn has_stream(&self) -> bool {
        self.state.lock().has_stream
    }

    /// Starts closing the connection: the writer sends a disconnect request after all queued
    /// requests. Requests that have no reply by then fail.
    pub(super) fn close(&self) {
        self.state.lock().is_closing = true;
        self.changed.notify_all();
    }

    /// Waits until the connection is being closed.
    pub(super) async fn closed(&self) {
        self.changed.wait_until(|| self.is_closing().then_some(())).await;
    }

    /// Whether the connection is being closed, so that the end of its stream is no failure.
    pub(super) fn is_closing(&self) -> bool {
        self.state.lock().is_closing
    }
}

/// The future of a request that was begun. If the future is dropped, the request continues, and the
/// connection keeps its memory until the reply has arrived.
pub(super) struct Submitted {
    transmission: Option<Arc<Transmission>>,
    /// The cookie, or the error if the request could not be begun.
    result: Result<u64>,
}

impl Future for Submitted {
    type Output = Result<Option<BlockStatus>>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let cookie = match &this.result {
            Ok(cookie) => *cookie,
            Err(error) => return Poll::Ready(Err(error.duplicate())),
        };
        let Some(transmission) = &this.transmission else {
            let what = "the reply to a request of NBD was asked for twice";
            return Poll::Ready(Err(Error::new(ErrorKind::Io, what)));
        };
        match transmission.with_pending(|pending, _| pending.poll(cookie, cx.waker())) {
            Some(outcome) => {
                this.transmission = None;
                Poll::Ready(outcome)
            }
            None => Poll::Pending,
        }
    }
}

impl Drop for Submitted {
    fn drop(&mut self) {
        if let (Some(transmission), Ok(cookie)) = (&self.transmission, &self.result) {
            transmission.with_pending(|pending, detached| pending.detach(*cookie, detached));
        }
    }
}
