//! The server: listening sockets, connections, the division of resources among them, and their
//! orderly end.
//!
//! Guarantees: a client that sends nothing, does not receive its replies, or sends large or invalid
//! requests does not block other clients. Payloads take at most [`Limits::bytes_of_all`], plus one
//! request's payload for each connection. The pool keeps 64 MiB at most for later requests, and
//! each connection needs about 200 KiB. A drain loses nothing that was acknowledged.

mod connection;
mod exports;
mod limits;
mod listen;
mod paused;
mod peer;
mod registry;

use std::io;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Context;
use std::time::Duration;

use blockhouse_core::{BufferPool, Storage, rare};
use blockhouse_engine::{Handle, Listener, Stream, is_stopped, sleep, timeout};
use connection::Connection;
pub use exports::{ClientEvent, ClientObserver, Export, ExportError, Exports, MAX_EXPORT_BITMAPS};
pub use limits::Limits;
pub use listen::{
    BACKLOG, BoundSocket, SocketFile, SocketPermissions, bind, bind_for, bind_private,
};
pub use paused::{PausedConnection, PausedSession};
use peer::{Peer, Transport};
use registry::{Clients, ConnectionGuard, Origin, Registry};

use crate::session::ByteLimit;
use crate::tls::TlsServer;

/// Maximum bytes of free memory that the pool keeps for payloads of later requests.
const POOL_BYTES: usize = 64 << 20;

/// How long the server waits after the kernel could not accept a connection.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// How long a connection that is ended to admit another client may still receive replies. At most
/// half of [`Limits::handshake`].
const MAX_END_TIME: Duration = Duration::from_secs(5);

/// An NBD server: the state shared by the clients of all its sockets. Clones share one server. The
/// [crate's page](crate) has a complete example.
#[derive(Clone)]
pub struct Server(Arc<Shared>);

struct Shared {
    registry: Arc<Registry>,
    limits: Limits,
    byte_limit: Arc<ByteLimit>,
    pool: BufferPool,
    /// How many sockets were served so far.
    sockets: AtomicUsize,
}

impl Server {
    /// A server that listens nowhere yet.
    pub fn new(limits: Limits) -> Self {
        let end_time = MAX_END_TIME.min(limits.handshake / 2);
        Self(Arc::new(Shared {
            registry: Arc::new(Registry::new(limits.connections, end_time)),
            limits,
            byte_limit: Arc::new(ByteLimit::new(limits.shared_bytes())),
            pool: BufferPool::new(POOL_BYTES),
            sockets: AtomicUsize::new(0),
        }))
    }

    /// How long clients may take to receive their replies when the server ends.
    pub fn drain_time(&self) -> Duration {
        self.0.limits.drain
    }

    /// Accepts connections until the server [drains](Self::drain) or [`close`](Self::close)s
    /// `exports`, and serves them on `loops` in turn. The clients of this socket see only
    /// `exports`. Several sockets may be served at once, from any loop, with the same exports or
    /// with different ones.
    ///
    /// # Errors
    /// If the socket cannot accept connections at all. Errors of single connections are logged.
    ///
    /// # Panics
    /// If `loops` is empty.
    pub async fn serve<S: Storage + Send + Sync>(
        &self,
        listener: &Listener,
        exports: &Exports<S>,
        loops: &[Handle],
    ) -> io::Result<()> {
        self.serve_with(listener, exports, loops, Vec::new()).await
    }

    /// As [`serve`](Self::serve), and resumes connections of this socket that have paused in
    /// another process.
    ///
    /// # Errors
    /// As [`serve`](Self::serve).
    ///
    /// # Panics
    /// If `loops` is empty.
    pub async fn serve_with<S: Storage + Send + Sync>(
        &self,
        listener: &Listener,
        exports: &Exports<S>,
        loops: &[Handle],
        connections: Vec<(Stream, PausedSession)>,
    ) -> io::Result<()> {
        let Shared { registry, limits, sockets, .. } = &*self.0;
        let transport = Transport::of(listener);
        let socket = sockets.fetch_add(1, Ordering::Relaxed);
        let mut loops = loops.iter().cycle();
        let mut next_loop = || loops.next().expect("a server needs at least one loop");
        for (stream, session) in connections {
            let peer = transport.peer(&stream);
            if let Some(guard) = registry.enter_served(&stream, Origin { socket, peer }) {
                let connection = self.connection(stream, peer, guard, exports);
                drop(next_loop().spawn(move || rare(connection.go_on(session))));
            }
        }
        while !exports.is_closed() && registry.wait_may_accept().await {
            let _accepting = registry.begin_accepting();
            // The condition is checked after each client, so that a continuous arrival of new
            // clients does not keep the loop from ending.
            while registry.may_accept() && !exports.is_closed() {
                let (of_socket, max) = (
                    Clients::At(socket),
                    exports.max_connections().map_or(usize::MAX, NonZeroUsize::get),
                );
                if registry.clients(of_socket) >= max {
                    registry.wait_fewer(of_socket, max, || exports.is_closed()).await;
                    continue;
                }
                let is_stopped_now = |context: &Context<'_>| {
                    registry.poll_accept_stopped(context) || exports.is_closed()
                };
                match listener.accept_until(is_stopped_now).await {
                    Ok(stream) => {
                        let peer = transport.peer(&stream);
                        transport.configure(&stream, limits.keepalive);
                        let Some(guard) = registry.enter(&stream, Origin { socket, peer }) else {
                            tracing::debug!(%peer, "client refused: too many wait already");
                            continue;
                        };
                        let connection = self.connection(stream, peer, guard, exports);
                        // The connection's task runs on its own, so the handle is dropped. The
                        // connection's guard reports its end to the registry.
                        drop(next_loop().spawn(move || rare(connection.serve())));
                    }
                    Err(error) if is_stopped(&error) => break,
                    Err(error) if is_fatal(&error) => return Err(error),
                    Err(error) => {
                        tracing::warn!("cannot accept a connection: {error}");
                        sleep(RETRY_DELAY).await;
                    }
                }
            }
        }
        Ok(())
    }

    fn connection<S: Storage>(
        &self,
        stream: Stream,
        peer: Peer,
        guard: ConnectionGuard,
        exports: &Exports<S>,
    ) -> Connection<S> {
        Connection {
            stream,
            peer,
            guard,
            exports: exports.clone(),
            limits: self.0.limits,
            byte_limit: Arc::clone(&self.0.byte_limit),
            pool: self.0.pool.clone(),
        }
    }

    /// Stops accepting clients at the sockets where `exports` are served, so that their
    /// [`serve`](Self::serve) returns. Existing connections continue.
    pub fn close<S: Storage>(&self, exports: &Exports<S>) {
        exports.close();
        self.0.registry.wake();
    }

    /// Stops offering an export, and ends the connections to it as [`drain`](Self::drain) does:
    /// requests in flight complete. On return no connection uses the export's disk. `None` if no
    /// export has this name.
    pub async fn remove<S: Storage>(&self, exports: &Exports<S>, name: &str) -> Option<Export<S>> {
        let Shared { registry, limits, .. } = &*self.0;
        let (export, id) = exports.take(name)?;
        if !registry.end_clients(Clients::Of(id), limits.drain).await {
            tracing::info!(
                "clients of the export {name:?} that did not take their replies were cut off"
            );
        }
        Some(export)
    }

    /// How many connections use the export of this name.
    pub fn clients<S: Storage>(&self, exports: &Exports<S>, name: &str) -> usize {
        exports.get(name).map_or(0, |(_, id)| self.0.registry.clients(Clients::Of(id)))
    }

    /// The users of the export of this name: for each connection a process of this host, or an
    /// address.
    pub fn peers<S: Storage>(&self, exports: &Exports<S>, name: &str) -> Vec<String> {
        let peers = exports.get(name).map(|(_, id)| self.0.registry.peers(Clients::Of(id)));
        peers.into_iter().flatten().map(|peer| peer.to_string()).collect()
    }

    /// How many connections use TLS. They can pause, but another process cannot continue them.
    pub fn encrypted_clients(&self) -> usize {
        self.0.registry.clients(Clients::Encrypted)
    }

    /// Ends the connections that use TLS, as [`drain`](Self::drain) does: requests in flight
    /// complete. Clients that have not received their replies in `time` are disconnected. Returns
    /// after twice that time at the latest, even if requests have not completed.
    pub async fn end_encrypted_clients(&self, time: Duration) {
        let ended = self.0.registry.end_clients(Clients::Encrypted, time);
        if timeout(time * 2, ended).await != Some(true) {
            tracing::info!("clients with TLS that did not take their replies were cut off");
        }
    }

    /// Disconnects the clients with TLS that `tls` no longer admits, after its files were read
    /// again. Requests in flight complete without replies.
    pub fn end_refused_clients(&self, tls: &TlsServer) {
        for peer in self.0.registry.disconnect_refused(|shown| tls.still_admits(shown)) {
            tracing::info!(%peer, "client disconnected: what it has shown was revoked");
        }
    }

    /// Accepts nothing more until [`resume`](Self::resume): new clients wait in the backlog of
    /// their socket. Waits until all accepted clients have completed the handshake. Clients still
    /// in the handshake after `time`, and those that wait for a free connection, are disconnected.
    /// All others continue.
    pub async fn pause_accepting(&self, time: Duration) {
        self.0.registry.pause_accepting(time).await;
    }

    /// Pauses all connections, after [`pause_accepting`](Self::pause_accepting): no further request
    /// is read, those that were read complete, and their replies are sent. Returns the state that
    /// each connection continues from: here after [`resume`](Self::resume), or in another process
    /// by [`serve_with`](Self::serve_with).
    ///
    /// # Errors
    /// The peers that have not received their replies in `time`, or whose requests have not
    /// completed.
    pub async fn pause(&self, time: Duration) -> Result<Vec<PausedConnection>, Vec<String>> {
        self.0.registry.pause(time).await
    }

    /// Continues after [`pause_accepting`](Self::pause_accepting) and [`pause`](Self::pause), as if
    /// there had been no pause.
    pub fn resume(&self) {
        self.0.registry.resume();
    }

    /// Accepts no more connections, and ends each connection when the replies to its requests in
    /// flight are sent. This is the first step of [`drain`](Self::drain).
    pub fn begin_drain(&self) {
        self.0.registry.drain();
    }

    /// Ends the server: accepts no more connections, and waits until every connection has completed
    /// and answered its requests in flight. Clients that make no progress for two seconds, or do
    /// not receive all of their replies in [`Limits::drain`], are disconnected; their requests
    /// still complete. The disks are not flushed; the caller must do that.
    pub async fn drain(&self) {
        let Shared { registry, limits, .. } = &*self.0;
        self.begin_drain();
        if timeout(limits.drain, registry.wait_empty()).await.is_none() {
            tracing::info!("clients that do not take their replies are cut off");
            registry.disconnect_all();
            registry.wait_empty().await;
        }
    }
}

/// Whether the listening socket itself is unusable. Other errors concern one connection, or are
/// temporary.
fn is_fatal(error: &io::Error) -> bool {
    use rustix::io::Errno;
    matches!(
        Errno::from_io_error(error),
        Some(Errno::BADF | Errno::INVAL | Errno::NOTSOCK | Errno::OPNOTSUPP)
    )
}
