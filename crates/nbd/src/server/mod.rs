//! The server: listening sockets, connections, their shares and their orderly end.
//!
//! Promises: no client can keep others from being served by staying silent, by not receiving its
//! replies, by what it asks or by nonsense; what is held in memory is at most [`Limits::bytes_of_all`] of
//! payloads and the payload of one request more for each connection, 64 MiB that are kept for the next
//! requests, and about 200 KiB a connection; a drain loses nothing that a client was told is done.

mod connection;
mod exports;
mod listen;
mod peer;
mod registry;

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use blockhouse_core::{BufferPool, InFlightLimits, Storage};
use blockhouse_engine::{Handle, Listener, sleep};
use connection::within;
pub use exports::{Export, ExportError, Exports};
use futures_util::future::{Either, select};
pub use listen::{Bound, SocketFile, bind, bind_private};
use peer::Transport;
use registry::{Origin, Registry};

use crate::proto::MAX_PAYLOAD;
use crate::session::Budget;

/// How much memory for payloads is kept for the next request, in bytes.
const POOL: usize = 64 << 20;

/// How long to leave the kernel alone after it could not accept a connection.
const PAUSE: Duration = Duration::from_millis(100);

/// How long a connection that makes room for another client may go on receiving its replies; half of the
/// time that a client waits, where that is shorter.
const MAX_LEAVE: Duration = Duration::from_secs(5);

/// What clients may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at once. When all are taken, a client that holds few of them gets one from those
    /// that hold many, or that never asked for anything; otherwise it waits.
    pub connections: usize,
    /// The time that a handshake may take, and that a client may wait for its turn before it.
    pub handshake: Duration,
    /// How long a client may stand still while it receives its replies or sends a request; `None` for
    /// ever.
    pub stall: Option<Duration>,
    /// How long a client may ask for nothing; `None` for ever.
    pub idle: Option<Duration>,
    /// After how long without a word a TCP client is asked whether it is still there, and in how long
    /// again without an answer it is taken for dead; `None` for never.
    pub keepalive: Option<Duration>,
    /// Requests in flight on one connection. Further ones wait in the socket.
    pub requests: usize,
    /// Bytes of payloads in flight on one connection; one request is always let in. Further ones
    /// wait in the socket.
    pub bytes: usize,
    /// Bytes of payloads in flight on all connections together. Half of them are reserved, in equal
    /// parts for all connections that there can be; of the other half no connection holds more than what
    /// is left for all others. One request of each is always let in.
    pub bytes_of_all: usize,
    /// The time that a drain leaves clients to receive their last replies.
    pub drain: Duration,
}

impl Default for Limits {
    /// 256 connections, 30 seconds to shake hands and to stand still, no limit to being idle, one minute
    /// of silence over TCP, 128 requests and 64 MiB in flight on each connection, 512 MiB on all of them,
    /// 5 seconds to drain.
    fn default() -> Self {
        Self {
            connections: 256,
            handshake: Duration::from_secs(30),
            stall: Some(Duration::from_secs(30)),
            idle: None,
            keepalive: Some(Duration::from_secs(60)),
            requests: InFlightLimits::DEFAULT.requests,
            bytes: InFlightLimits::DEFAULT.bytes as usize,
            bytes_of_all: 16 * MAX_PAYLOAD as usize,
            drain: Duration::from_secs(5),
        }
    }
}

impl Limits {
    /// Bytes that each connection can have whatever others hold.
    fn reserved(&self) -> usize {
        self.bytes_of_all / 2 / self.connections.max(1)
    }
}

/// An NBD server: what the clients of all its sockets share. Clones are the same server.
#[derive(Clone)]
pub struct Server(Arc<Shared>);

/// What all connections share.
struct Shared {
    registry: Arc<Registry>,
    limits: Limits,
    budget: Arc<Budget>,
    pool: BufferPool,
    /// How many sockets were served so far.
    sockets: AtomicUsize,
}

impl Server {
    /// A server that listens nowhere yet.
    pub fn new(limits: Limits) -> Self {
        Self(Arc::new(Shared {
            registry: Arc::new(Registry::new(
                limits.connections,
                MAX_LEAVE.min(limits.handshake / 2),
            )),
            limits,
            budget: Arc::new(Budget::new(
                limits.bytes_of_all - limits.reserved() * limits.connections,
            )),
            pool: BufferPool::new(POOL),
            sockets: AtomicUsize::new(0),
        }))
    }

    /// Accepts connections until the server [drains](Self::drain), and serves them on `loops`, each
    /// on the next one. They find `exports` and nothing else. Several sockets may be served at once,
    /// from any loop, with the same exports or with different ones.
    ///
    /// # Errors
    /// When the socket cannot accept connections at all. Trouble with single connections is logged.
    ///
    /// # Panics
    /// Without loops.
    pub async fn serve<S: Storage + Send + Sync>(
        &self,
        listener: &Listener,
        exports: &Exports<S>,
        loops: &[Handle],
    ) -> io::Result<()> {
        let Shared { registry, limits, sockets, .. } = &*self.0;
        let transport = Transport::of(listener);
        let socket = sockets.fetch_add(1, Ordering::Relaxed);
        let mut loops = loops.iter().cycle();
        let mut draining = pin!(registry.draining());
        loop {
            let accepted = match select(&mut draining, pin!(listener.accept())).await {
                Either::Left(_) => break,
                Either::Right((accepted, _)) => accepted,
            };
            match accepted {
                Ok(stream) => {
                    let peer = transport.peer(&stream);
                    transport.configure(&stream, limits);
                    let Some(seat) = registry.enter(&stream, Origin { socket, peer }) else {
                        tracing::debug!(%peer, "client refused: too many wait already");
                        continue;
                    };
                    let (shared, exports) = (Arc::clone(&self.0), exports.clone());
                    let home = loops.next().expect("a server needs at least one loop");
                    let serve = move || connection::serve(shared, exports, stream, peer, seat);
                    // A party of its own on its loop. Nothing waits for its outcome: the seat tells.
                    drop(home.spawn(serve));
                }
                Err(error) if is_hopeless(&error) => return Err(error),
                Err(error) => {
                    tracing::warn!("cannot accept a connection: {error}");
                    sleep(PAUSE).await;
                }
            }
        }
        Ok(())
    }

    /// Ends the server: accepts nothing more, has every connection finish and answer what it has in
    /// flight, and waits for that. Clients that stand still for two seconds, or do not receive all of
    /// their replies in [`Limits::drain`], are cut off; what they had asked for is finished all the same.
    /// The disks are left to their owner to flush.
    pub async fn drain(&self) {
        let Shared { registry, limits, .. } = &*self.0;
        registry.drain();
        if within(limits.drain, registry.empty()).await.is_none() {
            tracing::info!("clients that do not take their replies are cut off");
            registry.cut();
            registry.empty().await;
        }
    }
}

/// Whether the socket itself is of no use, rather than one connection or the moment.
fn is_hopeless(error: &io::Error) -> bool {
    use rustix::io::Errno;
    matches!(
        Errno::from_io_error(error),
        Some(Errno::BADF | Errno::INVAL | Errno::NOTSOCK | Errno::OPNOTSUPP)
    )
}
