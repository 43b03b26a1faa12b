//! The connections of a server: their limit, the choice of a connection to end so that another is
//! admitted, and the orderly end.
//!
//! Guarantee: the clients of a socket cannot block the clients of other sockets. At the same
//! socket, a process or host that holds many connections cannot block a client that holds few,
//! whether the many connections are silent, idle or busy. Below the limit no client is disconnected
//! for being idle, unless the limit `idle` is set, because a guest may have nothing to do for days.
//! At the limit, one connection is ended so that a waiting client can be admitted, chosen in this
//! order:
//!
//! 1. a connection that has sent no request yet, and whose handshake or transmission phase is at
//!    least a second old. Connections in the handshake come first; among these, the connections of
//!    the peer with the most connections; among these, the oldest;
//! 2. if each connection has sent a request: a connection of the socket with the most connections,
//!    or else, at the same socket, of the [`Peer`](super::peer::Peer) with the most. That socket or
//!    peer must hold at least two connections more than the socket or peer of the waiting client.
//!    If several peers hold the most, the connection of these peers that has been idle longest
//!    ends.
//!
//! Otherwise the client waits, in a queue of [`MAX_WAITING`](admission::MAX_WAITING).
//!
//! The socket is the unit of isolation: at one socket, a used connection does not end for a client
//! whose process or host would then hold as many connections as that of the used one. So a program
//! that forks, with one used connection in each child, can block other clients of its own socket.
//! Reason: the server cannot tell idle children from the guests of a host, which are processes with
//! one connection each. Ending the connection that has been idle longest would let an attacker
//! disconnect one guest after the other. Also, a client that may connect to a socket can do worse
//! than block others: it may read the socket's exports, and write to the writable ones. The owner
//! and mode of a Unix socket, or a firewall, restrict who may connect: clients that must not block
//! each other need sockets of their own.
//!
//! A connection that is asked to end completes its requests in flight and sends the replies. If
//! another client waits, the connection has at most the time given to [`Registry::new`]. Then it is
//! disconnected, even if its client is still receiving: a slow receiver would stay longer than the
//! other client may wait.

mod admission;
mod entry;

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

pub use admission::Clients;
use admission::{Admission, AdmissionState};
use blockhouse_engine::{Stream, sleep, timeout};
pub use entry::Origin;
use parking_lot::Mutex;

use crate::server::exports::ExportId;
use crate::server::paused::{PausedConnection, PausedSession};
use crate::server::peer::Peer;
use crate::session::{Activity, ShutdownSignal};
use crate::tls::Credential;

/// All connections of a server. Used when a connection begins or ends, never for its requests.
pub struct Registry {
    state: Mutex<AdmissionState>,
    limit: usize,
    end_time: Duration,
}

impl Registry {
    /// A registry that admits `limit` connections at once, at least one. A connection that is asked
    /// to end for a waiting client is disconnected after `end_time`.
    pub fn new(limit: usize, end_time: Duration) -> Self {
        Self { state: Mutex::default(), limit: limit.max(1), end_time }
    }

    /// Registers a connection, to be admitted now or later. `None` if the server is draining, or
    /// too many connections wait; then the caller closes the connection.
    pub fn enter(self: &Arc<Self>, stream: &Stream, origin: Origin) -> Option<ConnectionGuard> {
        let id = self.state.lock().enter(stream, origin, self.limit)?;
        Some(ConnectionGuard { registry: Arc::clone(self), id })
    }

    /// Registers a connection that has completed its handshake with another process. `None` if the
    /// server is draining.
    pub fn enter_served(
        self: &Arc<Self>,
        stream: &Stream,
        origin: Origin,
    ) -> Option<ConnectionGuard> {
        let id = self.state.lock().enter_served(stream, origin)?;
        Some(ConnectionGuard { registry: Arc::clone(self), id })
    }

    /// Records that a task accepts connections, until the guard is dropped.
    pub fn begin_accepting(&self) -> AcceptGuard<'_> {
        self.state.lock().set_accepting(true);
        AcceptGuard(self)
    }

    /// Whether connections may be accepted.
    pub fn may_accept(&self) -> bool {
        self.state.lock().may_accept()
    }

    /// Whether the server accepts no more connections; otherwise the task is woken when that
    /// changes.
    pub fn poll_accept_stopped(&self, context: &Context<'_>) -> bool {
        self.poll(context, |state| !state.may_accept()).is_ready()
    }

    /// Waits until connections may be accepted. False if the server is draining.
    pub async fn wait_may_accept(&self) -> bool {
        poll_fn(|context| self.poll(context, |state| state.may_accept() || state.is_draining()))
            .await;
        !self.state.lock().is_draining()
    }

    /// Stops accepting connections until [`resume`](Self::resume), and waits until all handshakes
    /// are complete. Connections in a handshake after `time` are disconnected.
    pub async fn pause_accepting(&self, time: Duration) {
        self.state.lock().pause_accepting();
        let settled = || poll_fn(|context| self.poll(context, AdmissionState::is_settled));
        if timeout(time, settled()).await.is_none() {
            self.state.lock().end_handshakes();
            settled().await;
        }
    }

    /// Pauses all connections, and waits until they have paused; returns their states.
    ///
    /// # Errors
    /// The peers that have not paused in `time`. They continue to pause.
    pub async fn pause(&self, time: Duration) -> Result<Vec<PausedConnection>, Vec<String>> {
        self.state.lock().pause();
        let paused = poll_fn(|context| self.poll(context, AdmissionState::is_paused));
        match timeout(time, paused).await {
            Some(()) => Ok(self.state.lock().paused()),
            None => Err(self.state.lock().busy()),
        }
    }

    /// Accepts connections again, and resumes all paused ones.
    pub fn resume(&self) {
        self.state.lock().resume();
    }

    /// Ends all connections: those in the handshake at once, the others when their requests in
    /// flight have completed. No more are accepted.
    pub fn drain(&self) {
        self.state.lock().drain();
    }

    /// Disconnects all clients. Requests in flight complete without replies.
    pub fn disconnect_all(&self) {
        self.state.lock().disconnect_all();
    }

    /// Waits until there are no connections.
    pub async fn wait_empty(&self) {
        poll_fn(|context| self.poll(context, AdmissionState::is_empty)).await;
    }

    /// Makes all waiting tasks check their condition again.
    pub fn wake(&self) {
        self.state.lock().wake();
    }

    /// Ends these connections: requests in flight complete. Clients that have not received their
    /// replies in `time` are disconnected; returns false if there was such a client. On return none
    /// of these connections is left.
    pub async fn end_clients(&self, which: Clients, time: Duration) -> bool {
        self.state.lock().end_clients(which);
        let gone = || poll_fn(|context| self.poll(context, |state| state.clients(which) == 0));
        if timeout(time, gone()).await.is_some() {
            return true;
        }
        self.state.lock().disconnect_clients(which);
        gone().await;
        false
    }

    /// Disconnects the clients with TLS that are no longer admitted, and returns their peers.
    /// Requests in flight complete without replies.
    pub fn disconnect_refused(&self, admits: impl Fn(&Credential) -> bool) -> Vec<Peer> {
        self.state.lock().disconnect_refused(admits)
    }

    /// Waits until there are fewer of these connections than `limit`, the server accepts no more,
    /// or `is_closed` returns true after a [`wake`](Self::wake).
    pub async fn wait_fewer(&self, which: Clients, limit: usize, is_closed: impl Fn() -> bool) {
        poll_fn(|context| {
            let is_over = |state: &AdmissionState| {
                state.clients(which) < limit || !state.may_accept() || is_closed()
            };
            self.poll(context, is_over)
        })
        .await;
    }

    /// How many of these connections there are.
    pub fn clients(&self, which: Clients) -> usize {
        self.state.lock().clients(which)
    }

    /// The peers of these connections.
    pub fn peers(&self, which: Clients) -> Vec<Peer> {
        self.state.lock().peers(which)
    }

    fn poll(&self, context: &Context<'_>, is_over: impl Fn(&AdmissionState) -> bool) -> Poll<()> {
        let mut state = self.state.lock();
        if is_over(&state) {
            return Poll::Ready(());
        }
        state.register(context);
        Poll::Pending
    }
}

/// A task that accepts connections, until it is dropped.
pub struct AcceptGuard<'a>(&'a Registry);

impl Drop for AcceptGuard<'_> {
    fn drop(&mut self) {
        self.0.state.lock().set_accepting(false);
    }
}

/// The entry of a connection in the registry. The drop removes the entry.
pub struct ConnectionGuard {
    registry: Arc<Registry>,
    id: u64,
}

impl ConnectionGuard {
    /// Waits until the connection is admitted, and ends another connection if necessary. False if
    /// the connection is refused.
    pub async fn admitted(&self) -> bool {
        let mut delay = None;
        poll_fn(|context| {
            loop {
                let mut state = self.registry.state.lock();
                match state.admission(self.id) {
                    Admission::Admitted => return Poll::Ready(true),
                    Admission::Waiting => {}
                    Admission::Refused => return Poll::Ready(false),
                }
                let retry_in = state.make_room(self.id, self.registry.end_time);
                state.register(context);
                drop(state);
                let Some(retry_in) = retry_in else { return Poll::Pending };
                if Pin::new(delay.insert(sleep(retry_in))).poll(context).is_pending() {
                    return Poll::Pending;
                }
            }
        })
        .await
    }

    /// Records that the handshake is complete, that the client has chosen `export`, and whether it
    /// uses TLS. Returns the signal that ends the transmission phase.
    pub fn start_transmission(
        &self,
        export: ExportId,
        credential: Option<Arc<Credential>>,
        activity: &Arc<Activity>,
    ) -> Arc<ShutdownSignal> {
        self.registry.state.lock().start_transmission(self.id, export, credential, activity)
    }
}

impl ConnectionGuard {
    /// Records that the connection has paused. Waits until it is resumed, and returns the session;
    /// `None` if the connection must end.
    pub async fn paused(&self, session: PausedSession) -> Option<PausedSession> {
        self.registry.state.lock().set_paused(self.id, session);
        poll_fn(|context| {
            let mut state = self.registry.state.lock();
            let resumed = state.take_resumed(self.id);
            if resumed.is_none() {
                state.register(context);
            }
            resumed.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        self.registry.state.lock().remove(self.id, self.registry.limit);
    }
}

#[cfg(test)]
mod tests;
