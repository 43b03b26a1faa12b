//! The transmission phase of one connection.
//!
//! A reader decodes requests, handlers execute them, and a writer sends the replies; these tasks
//! run on one thread. Guarantees: if a request fails, other requests are not affected. The
//! requests and bytes in flight are bounded; at the limit the server stops reading. At the end
//! every request that was read completes, and its reply is sent unless the connection is aborted.

mod activity;
mod block_status;
mod byte_limit;
mod end;
mod execute;
mod failure;
mod handler;
mod in_flight;
mod peer_wait;
mod reader;
mod reply_queue;
mod shutdown;
mod staging;
mod state;
mod writer;

use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

pub use activity::Activity;
use blockhouse_core::{BufferPool, InFlightLimits, Result, Storage};
use blockhouse_disk::{Access, Disk};
use blockhouse_engine::{PagePipes, Stream, sleep, spawn};
pub use byte_limit::ByteLimit;
pub use end::End;
use futures_util::future::{Either, select};
use in_flight::InFlightLimit;
use peer_wait::PeerWait;
use reader::Reader;
use reply_queue::{Batch, ReplyQueue};
pub use shutdown::ShutdownSignal;
use staging::Staging;
use state::SessionState;

use crate::bitmap::ExportBitmap;
use crate::handshake::NegotiatedOptions;
use crate::tls::TlsChannel;

/// The limits of one connection: requests in flight, and time without progress.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// Requests in flight, and bytes of their data.
    pub in_flight: InFlightLimits,
    /// Bytes in flight that only this connection can use.
    pub reserved: usize,
    /// Maximum time without progress while the client receives replies or sends a request.
    pub stall: Duration,
    /// As `stall`, after shutdown was requested.
    pub stall_at_end: Duration,
    /// Maximum time without a request in flight; `None` is no limit.
    pub idle: Option<Duration>,
}

/// A connection that has completed its handshake.
pub struct Session<S: Storage> {
    /// The socket.
    pub stream: Stream,
    /// TLS over the socket, if it is used.
    pub tls: Option<Rc<TlsChannel>>,
    /// The disk that is served.
    pub disk: Arc<Disk<S>>,
    /// The bitmaps that the export offers.
    pub bitmaps: Vec<ExportBitmap>,
    /// Whether the client may change the disk.
    pub access: Access,
    /// The options of the handshake.
    pub options: NegotiatedOptions,
    /// The allocator of payload memory.
    pub pool: BufferPool,
    /// The limits of this connection.
    pub limits: ConnectionLimits,
    /// The limit of bytes in flight that all connections share.
    pub byte_limit: Arc<ByteLimit>,
    /// The connection's activity, which other threads read.
    pub activity: Arc<Activity>,
}

/// The reason why a session has ended.
pub enum Outcome {
    /// The connection has ended.
    Ended(End),
    /// The connection continues in another session, which parses these received bytes first: no
    /// executed request contains them. All replies were sent.
    Paused(Vec<u8>),
}

impl<S: Storage> Session<S> {
    /// Serves the connection until it ends or pauses. `first` is data received before; `shutdown`
    /// requests the end or the pause.
    pub async fn run(self, first: &[u8], shutdown: Arc<ShutdownSignal>) -> Outcome {
        let limits = self.limits;
        let activity = Arc::clone(&self.activity);
        let (state, batch, staging) = match self.into_state(first) {
            Ok(parts) => parts,
            Err(error) => return Outcome::Ended(End::NoMemory(error)),
        };
        let writer = spawn(writer::run(Rc::clone(&state), batch));
        let served = pin!(serve(&state, Arc::clone(&shutdown), staging));
        let too_slow = pin!(too_slow(&state, limits, &activity, &shutdown));
        let (end, unparsed) = match select(served, too_slow).await {
            Either::Left((ended, _)) => ended,
            Either::Right((end, served)) => {
                state.abort();
                (end, served.await.1)
            }
        };
        state.replies.close();
        state.idle_handlers.end();
        writer.await;
        if let End::Paused = end {
            return Outcome::Paused(unparsed);
        }
        // After the client has ended the connection, no operation on the socket is in flight, so
        // the close of the socket is enough.
        if !matches!(end, End::Disconnected | End::Closed) {
            state.stream.shutdown();
        }
        Outcome::Ended(end)
    }

    /// The shared state of the tasks, a batch for the writer, and the staging buffer with the
    /// received bytes.
    ///
    /// # Errors
    /// ENOMEM if memory runs out.
    fn into_state(self, first: &[u8]) -> Result<(Rc<SessionState<S>>, Batch, Staging)> {
        let Self { stream, tls, disk, bitmaps, access, options, .. } = self;
        let Self { pool, limits, byte_limit, activity, .. } = self;
        let count = limits.in_flight.requests;
        let replies = ReplyQueue::new(&pool, options.framing, count)?;
        let batch = Batch::new(&pool, count)?;
        let staging = pool.get(reader::STAGING_BYTES.max(first.len()))?;
        let reserved = limits.reserved as u64;
        let in_flight = InFlightLimit::new(limits.in_flight, reserved, byte_limit, activity);
        let state = SessionState {
            stream,
            tls,
            disk,
            bitmaps,
            access,
            options,
            pool,
            pipes: PagePipes::default(),
            in_flight: Rc::new(in_flight),
            replies,
            peer_wait: PeerWait::default(),
            idle_handlers: Default::default(),
            failures: Default::default(),
        };
        Ok((Rc::new(state), batch, Staging::new(staging, first)))
    }
}

/// Reads requests until the connection ends or pauses, and waits for the requests in flight. Also
/// returns the bytes that were received and not parsed.
async fn serve<S: Storage>(
    state: &Rc<SessionState<S>>,
    shutdown: Arc<ShutdownSignal>,
    staging: Staging,
) -> (End, Vec<u8>) {
    let mut reader = Reader::new(Rc::clone(state), shutdown, staging);
    let end = reader.run().await;
    if let End::Failed(_) | End::BadMagic(_) | End::PayloadTooLong(_) = end {
        state.abort();
    }
    state.in_flight.drained().await;
    (end, reader.into_unparsed())
}

/// Resolves when the client has exceeded a time limit.
async fn too_slow<S: Storage>(
    state: &SessionState<S>,
    limits: ConnectionLimits,
    activity: &Activity,
    shutdown: &ShutdownSignal,
) -> End {
    let ConnectionLimits { stall, stall_at_end, idle, .. } = limits;
    let stalled = pin!(state.peer_wait.stalled(&state.stream, stall, stall_at_end, shutdown));
    match idle {
        None => stalled.await,
        Some(limit) => match select(stalled, pin!(idle_for(activity, limit))).await {
            Either::Left((end, _)) => end,
            Either::Right(_) => End::Idle(limit),
        },
    }
}

/// Resolves when no request has been in flight for `limit`.
async fn idle_for(activity: &Activity, limit: Duration) {
    loop {
        let left = limit.saturating_sub(activity.idle().unwrap_or_default());
        if left.is_zero() {
            return;
        }
        sleep(left).await;
    }
}
