//! A connection in the transmission phase.
//!
//! 1. [`Transmission::submit`] takes a request.
//! 2. The writer sends all that is queued with one system call.
//! 3. The reader receives replies, with their data straight into the memory of the requests, and
//!    completes the requests.
//! 4. If the stream fails, the reader and the writer end. If reconnecting is allowed, the requests
//!    wait for another stream and are sent again over it; otherwise they fail.
//! 5. When a stream ends, and before the next stream is opened, `storage/nbd/unflushed` checks
//!    whether writes were answered and not flushed. The check also happens when the stream ends
//!    because its loop ends; then requests of other loops on this connection fail.

use std::cell::RefCell;
use std::future::pending;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockhouse_core::Result;
use blockhouse_engine::{sleep, spawn, spawn_detached};
use futures_util::future::{Either, select};

use super::dial::Dial;
use super::link::Link;
use super::reader::Reader;
use super::transmission::Transmission;
use super::unflushed::{StreamGuard, UnflushedWrites};
use super::writer::{self, Batch};
use crate::detached::DetachedSyncs;

/// The pause after a failed attempt to connect, or after a stream that answered no request.
pub(super) const RETRY_DELAY: Duration = Duration::from_millis(200);

/// Starts the transmission over `stream` on the current thread's loop. `number` is the index of
/// this connection in the storage's list.
///
/// # Errors
/// ENOMEM if memory runs out.
pub(super) fn start(
    dial: Arc<Dial>,
    detached: Arc<DetachedSyncs>,
    unflushed: Arc<UnflushedWrites>,
    number: usize,
    stream: Link,
) -> Result<Arc<Transmission>> {
    let transmission = Arc::new(Transmission::new(dial, detached, unflushed, number));
    let halves = Halves::new(&transmission, &stream)?;
    let guard = transmission.begin_stream();
    let served = Arc::clone(&transmission);
    // Dropped when the task ends, or with its loop, even if the loop never ran the task.
    let ending = LoopGuard(Arc::clone(&transmission));
    spawn_detached(async move {
        let _ending = ending;
        run(served, stream, guard, halves).await;
    });
    Ok(transmission)
}

/// Marks the connection as ended when its task or its loop ends.
struct LoopGuard(Arc<Transmission>);

impl Drop for LoopGuard {
    fn drop(&mut self) {
        self.0.loop_ended();
    }
}

/// The reader and the writer of one stream.
struct Halves {
    reader: Reader,
    batch: Batch,
}

impl Halves {
    fn new(transmission: &Arc<Transmission>, stream: &Link) -> Result<Self> {
        let reader = Reader::new(Arc::clone(transmission), stream.clone())?;
        Ok(Self { reader, batch: Batch::new()? })
    }
}

/// Serves requests over a stream, and over the streams that replace it.
async fn run(
    transmission: Arc<Transmission>,
    mut stream: Link,
    mut guard: StreamGuard,
    mut halves: Halves,
) {
    let mut deadline = None;
    loop {
        let begun = Instant::now();
        let Halves { reader, batch } = halves;
        let reading = spawn(reader.run());
        writer::run(Arc::clone(&transmission), stream.clone(), batch).await;
        reading.await;
        if transmission.is_closing() {
            let closed = transmission.dial().error("the connection is closed");
            return transmission.fail_all(closed, true);
        }
        drop(guard);
        let time = transmission.dial().reconnect_time();
        if !transmission.is_stuck() || begun.elapsed() >= time {
            deadline = None;
        }
        let Some(next) = reconnect(&transmission, &mut deadline).await else { return };
        stream = next;
        guard = transmission.begin_stream();
        halves = match Halves::new(&transmission, &stream) {
            Ok(halves) => halves,
            Err(error) => return transmission.fail_all(error, true),
        };
    }
}

/// Opens another stream to the same export. Requests wait for the stream until `deadline`, then
/// fail; the attempts continue. The deadline is that of an earlier stream if none of its requests
/// was answered: a server may end each new connection at the request that is sent again. `None` if
/// the connection is being closed, or if the reconnect time is zero.
async fn reconnect(transmission: &Transmission, deadline: &mut Option<Instant>) -> Option<Link> {
    let failure = transmission.take_link_failure();
    let dial = transmission.dial();
    let time = dial.reconnect_time();
    if time.is_zero() {
        transmission.fail_all(failure, true);
        return None;
    }
    let is_repeated = deadline.is_some();
    if !is_repeated {
        tracing::warn!("{failure}; connecting again, requests wait for {} s", time.as_secs());
    }
    let end = *deadline.get_or_insert_with(|| Instant::now() + time);
    let last_error = RefCell::new(failure);
    let dialing = pin!(async {
        if is_repeated {
            sleep(RETRY_DELAY).await;
        }
        loop {
            match dial.again().await {
                Ok(stream) => return stream,
                Err(error) => last_error.replace(error),
            };
            sleep(RETRY_DELAY).await;
        }
    });
    let failing = pin!(async {
        sleep(end.saturating_duration_since(Instant::now())).await;
        let error = last_error.borrow().duplicate();
        tracing::error!("{error}; requests fail until the server is back");
        transmission.fail_all(error, false);
        pending::<()>().await;
    });
    match select(dialing, select(pin!(transmission.closed()), failing)).await {
        Either::Left((stream, _)) => {
            let is_late = Instant::now() >= end;
            if is_late {
                *deadline = None;
            }
            if is_late || !is_repeated {
                tracing::warn!("{}: connected again", dial.name());
            }
            transmission.queue_again();
            Some(stream)
        }
        Either::Right(_) => {
            transmission.fail_all(last_error.borrow().duplicate(), true);
            None
        }
    }
}
