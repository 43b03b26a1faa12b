//! The server: listening sockets, connections and their orderly end.
//!
//! Promises: no client can keep others from being served by staying silent in its handshake, by
//! what it asks or by nonsense; what is held in memory is at most [`Limits::bytes_of_all`] of payloads
//! and the payload of one request more for each connection, 64 MiB that are kept for the next requests,
//! and about 200 KiB a connection; a drain loses nothing that a client was told is done.

mod connection;
mod exports;
mod listen;
mod registry;

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{BufferPool, InFlightLimits, Storage};
use blockhouse_engine::{Handle, Listener, sleep};
use connection::within;
pub use exports::{Export, ExportError, Exports};
use futures_util::future::{Either, select};
pub use listen::{Bound, SocketFile, bind, bind_private};
use registry::{Registry, Room};

use crate::proto::MAX_PAYLOAD;
use crate::session::Budget;

/// How much memory for payloads is kept for the next request, in bytes.
const POOL: usize = 64 << 20;

/// How long to leave the kernel alone after it could not accept a connection.
const PAUSE: Duration = Duration::from_millis(100);

/// What clients may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at once. Further ones wait in the kernel's queue.
    pub connections: usize,
    /// The time that a handshake may take.
    pub handshake: Duration,
    /// Requests in flight on one connection. Further ones wait in the socket.
    pub requests: usize,
    /// Bytes of payloads in flight on one connection; one request is always let in. Further ones
    /// wait in the socket.
    pub bytes: usize,
    /// Bytes of payloads in flight on all connections together. Where they are in use, further requests
    /// wait in the socket, but for one on each connection.
    pub bytes_of_all: usize,
    /// The time that a drain leaves clients to receive their last replies.
    pub drain: Duration,
}

impl Default for Limits {
    /// 256 connections, 30 seconds to shake hands, 128 requests and 64 MiB in flight on each
    /// connection, 512 MiB on all of them, 20 seconds to drain.
    fn default() -> Self {
        Self {
            connections: 256,
            handshake: Duration::from_secs(30),
            requests: InFlightLimits::DEFAULT.requests,
            bytes: InFlightLimits::DEFAULT.bytes as usize,
            bytes_of_all: 16 * MAX_PAYLOAD as usize,
            drain: Duration::from_secs(20),
        }
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
}

impl Server {
    /// A server that listens nowhere yet.
    pub fn new(limits: Limits) -> Self {
        Self(Arc::new(Shared {
            registry: Arc::new(Registry::new(limits.connections)),
            limits,
            budget: Arc::new(Budget::new(limits.bytes_of_all)),
            pool: BufferPool::new(POOL),
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
        let registry = &self.0.registry;
        let mut loops = loops.iter().cycle();
        while registry.room().await == Room::Free {
            let accepted = match select(pin!(listener.accept()), pin!(registry.draining())).await {
                Either::Left((accepted, _)) => accepted,
                Either::Right(_) => break,
            };
            match accepted {
                Ok(stream) => {
                    // Another socket's client may have been quicker.
                    let Some(seat) = registry.enter(&stream) else { continue };
                    let (shared, exports) = (Arc::clone(&self.0), exports.clone());
                    let home = loops.next().expect("a server needs at least one loop");
                    // Nobody waits for its outcome: the seat tells when it is over.
                    drop(home.spawn(move || connection::serve(shared, exports, stream, seat)));
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
    /// flight, and waits for that. Clients that do not take their replies in time are cut off; what
    /// they had asked for is finished all the same. The disks are left to their owner to flush.
    pub async fn drain(&self) {
        let Shared { registry, limits, .. } = &*self.0;
        registry.drain();
        if within(limits.drain, registry.empty()).await.is_none() {
            tracing::warn!("clients that do not take their replies are cut off");
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
