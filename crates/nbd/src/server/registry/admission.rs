//! Decides which connections are admitted, wait or end. The module `registry` states the rules.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use blockhouse_engine::Stream;

use super::entry::{Entry, Origin};
use crate::server::exports::ExportId;
use crate::server::paused::{PausedConnection, PausedSession};
use crate::server::peer::Peer;
use crate::session::{Activity, ShutdownSignal};
use crate::tls::Credential;

/// A connection that has sent no request for this long may be ended in favor of another client.
const UNUSED_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum number of connections that wait for admission. For one more, the peer with the most
/// waiting connections loses its newest one, or the new connection is refused.
pub const MAX_WAITING: usize = 64;

/// The result for one more connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// The connection may begin its handshake.
    Admitted,
    /// The connection waits for admission.
    Waiting,
    /// The caller closes the connection.
    Refused,
}

/// A subset of the connections.
#[derive(Clone, Copy, Debug)]
pub enum Clients {
    /// Connections that use an export.
    Of(ExportId),
    /// Connections that use TLS.
    Encrypted,
    /// Connections of a socket, those in their handshakes included.
    At(usize),
}

impl Clients {
    fn contain(self, entry: &Entry) -> bool {
        match self {
            Self::Of(export) => entry.export() == Some(export),
            Self::Encrypted => entry.is_encrypted(),
            Self::At(socket) => entry.origin().socket == socket,
        }
    }
}

/// All connections of a server.
#[derive(Default)]
pub struct AdmissionState {
    entries: Vec<Entry>,
    next_id: u64,
    is_draining: bool,
    pause: Pause,
    /// How many tasks accept connections.
    accepting: usize,
    /// Tasks that wait for a change.
    waiters: Vec<Waker>,
}

/// Whether connections are accepted and served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Pause {
    /// Connections are accepted and served.
    #[default]
    None,
    /// No new connection is accepted; those in the transmission phase continue.
    Accepting,
    /// No connection is accepted, and no connection reads requests.
    All,
}

/// How many connections each socket, and each peer at its socket, has.
#[derive(Default)]
struct Counts {
    sockets: BTreeMap<usize, usize>,
    origins: BTreeMap<Origin, usize>,
}

impl Counts {
    fn of<'a>(entries: impl Iterator<Item = &'a Entry>) -> Self {
        let mut counts = Self::default();
        for entry in entries {
            let origin = entry.origin();
            *counts.sockets.entry(origin.socket).or_default() += 1;
            *counts.origins.entry(origin).or_default() += 1;
        }
        counts
    }

    fn socket(&self, socket: usize) -> usize {
        self.sockets.get(&socket).copied().unwrap_or(0)
    }

    fn origin(&self, origin: Origin) -> usize {
        self.origins.get(&origin).copied().unwrap_or(0)
    }
}

impl AdmissionState {
    /// Whether there are no connections.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether the server is draining.
    pub fn is_draining(&self) -> bool {
        self.is_draining
    }

    /// Registers a connection, to be admitted now or later. At most `limit` connections are
    /// admitted at once. Returns its number; `None` if the server is draining, or too many
    /// connections wait.
    pub fn enter(&mut self, stream: &Stream, origin: Origin, limit: usize) -> Option<u64> {
        if self.is_draining {
            return None;
        }
        let is_free = self.entries.len() < limit;
        if !is_free && !self.may_wait(origin) {
            return None;
        }
        Some(self.push(stream, origin, is_free))
    }

    /// Registers a connection that has done its handshake with another process, also beyond the
    /// limit. Returns its number; `None` if the server is draining.
    pub fn enter_served(&mut self, stream: &Stream, origin: Origin) -> Option<u64> {
        (!self.is_draining).then(|| self.push(stream, origin, true))
    }

    fn push(&mut self, stream: &Stream, origin: Origin, is_admitted: bool) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        let mut entry = Entry::new(id, stream.clone(), origin);
        if is_admitted {
            entry.admit();
        }
        self.entries.push(entry);
        id
    }

    /// Records that a task has begun or stopped accepting connections.
    pub fn set_accepting(&mut self, accepts: bool) {
        if accepts {
            self.accepting += 1
        } else {
            self.accepting -= 1
        }
        self.wake();
    }

    /// Whether connections may be accepted.
    pub fn may_accept(&self) -> bool {
        self.pause == Pause::None && !self.is_draining
    }

    /// Makes all tasks stop accepting connections.
    pub fn pause_accepting(&mut self) {
        self.pause = Pause::Accepting;
        self.wake();
    }

    /// Whether no task accepts connections, and all connections have done their handshakes.
    pub fn is_settled(&self) -> bool {
        self.accepting == 0 && self.entries.iter().all(Entry::is_in_transmission)
    }

    /// Disconnects all connections that have not done their handshake.
    pub fn end_handshakes(&mut self) {
        let early = self.entries.iter_mut().filter(|entry| !entry.is_in_transmission());
        early.for_each(Entry::disconnect);
        self.wake();
    }

    /// Makes all connections pause.
    pub fn pause(&mut self) {
        self.pause = Pause::All;
        self.entries.iter().for_each(Entry::pause);
    }

    /// Whether all connections have paused.
    pub fn is_paused(&self) -> bool {
        self.entries.iter().all(|entry| entry.paused().is_some())
    }

    /// The connections that have paused.
    pub fn paused(&self) -> Vec<PausedConnection> {
        let paused = |entry: &Entry| {
            let session = entry.paused()?.clone();
            let (socket, stream) = (entry.origin().socket, entry.stream().clone());
            Some(PausedConnection { socket, stream, session })
        };
        self.entries.iter().filter_map(paused).collect()
    }

    /// Descriptions of the connections that have not paused.
    pub fn busy(&self) -> Vec<String> {
        let busy = self.entries.iter().filter(|entry| entry.paused().is_none());
        busy.map(|entry| entry.origin().peer.to_string()).collect()
    }

    /// Accepts connections again, and resumes all paused ones.
    pub fn resume(&mut self) {
        self.pause = Pause::None;
        self.entries.iter().for_each(Entry::resume);
        self.wake();
    }

    /// Records that a connection has paused.
    pub fn set_paused(&mut self, id: u64, session: PausedSession) {
        let entry = self.entries.iter_mut().find(|entry| entry.id() == id);
        entry.map(|entry| entry.set_paused(session));
        self.wake();
    }

    /// The session from which a connection resumes. `None` while the connection is paused;
    /// `Some(None)` if it must end.
    pub fn take_resumed(&mut self, id: u64) -> Option<Option<PausedSession>> {
        let is_over = self.pause != Pause::All;
        let entry = self.entries.iter_mut().find(|entry| entry.id() == id)?;
        if entry.is_ending() { Some(None) } else { is_over.then(|| entry.take_paused()) }
    }

    /// Whether the connection is admitted, waits or must be closed.
    pub fn admission(&self, id: u64) -> Admission {
        match self.entries.iter().find(|entry| entry.id() == id) {
            Some(entry) if entry.is_in_handshake() => Admission::Admitted,
            Some(entry) if entry.is_waiting() => Admission::Waiting,
            _ => Admission::Refused,
        }
    }

    /// Begins the transmission phase of a connection, which has not been removed.
    pub fn start_transmission(
        &mut self,
        id: u64,
        export: ExportId,
        credential: Option<Arc<Credential>>,
        activity: &Arc<Activity>,
    ) -> Arc<ShutdownSignal> {
        let is_paused = self.pause == Pause::All;
        let entry = self.entries.iter_mut().find(|entry| entry.id() == id);
        let signal = entry.map(|entry| {
            let signal = entry.start_transmission(export, credential, activity);
            if is_paused {
                entry.pause();
            }
            signal
        });
        self.wake();
        signal.unwrap_or_default()
    }

    /// Removes a connection that has ended. A waiting connection may be admitted in its place.
    pub fn remove(&mut self, id: u64, limit: usize) {
        self.entries.retain(|entry| entry.id() != id);
        if self.entries.len() >= limit {
            self.admit_waiting(limit);
        }
        self.wake();
    }

    /// Begins the end of all connections, and admits no more.
    pub fn drain(&mut self) {
        self.is_draining = true;
        self.entries.iter_mut().for_each(Entry::end);
        self.wake();
    }

    /// Shuts down the streams of all connections, which ends all operations on them.
    pub fn disconnect_all(&self) {
        self.entries.iter().for_each(Entry::shut_stream_down);
    }

    /// How many of these connections there are.
    pub fn clients(&self, which: Clients) -> usize {
        self.entries.iter().filter(|entry| which.contain(entry)).count()
    }

    /// The peers of these connections.
    pub fn peers(&self, which: Clients) -> Vec<Peer> {
        let entries = self.entries.iter().filter(|entry| which.contain(entry));
        entries.map(|entry| entry.origin().peer).collect()
    }

    /// Begins the end of these connections.
    pub fn end_clients(&mut self, which: Clients) {
        self.entries.iter_mut().filter(|entry| which.contain(entry)).for_each(Entry::end);
        self.wake();
    }

    /// Disconnects the clients that use TLS and are no longer admitted. Returns their peers.
    pub fn disconnect_refused(&mut self, admits: impl Fn(&Credential) -> bool) -> Vec<Peer> {
        let is_refused =
            |entry: &&mut Entry| entry.credential().is_some_and(|shown| !admits(shown));
        let refused = self.entries.iter_mut().filter(is_refused);
        let peers = refused.map(|entry| {
            entry.disconnect();
            entry.origin().peer
        });
        let peers = peers.collect();
        self.wake();
        peers
    }

    /// Shuts down the streams of these connections, which ends all operations on them.
    pub fn disconnect_clients(&self, which: Clients) {
        let clients = self.entries.iter().filter(|entry| which.contain(entry));
        clients.for_each(Entry::shut_stream_down);
    }

    /// Ends a connection so that the waiting connection `id` can be admitted, unless enough
    /// connections are ending already. A connection that was asked to end `end_time` ago is
    /// disconnected. Returns the time until the next attempt, if known.
    pub fn make_room(&mut self, id: u64, end_time: Duration) -> Option<Duration> {
        let overdue_in = self.disconnect_overdue(end_time);
        let ending = self.admitted().filter(|entry| entry.is_ending()).count();
        if ending >= self.entries.len() - self.admitted().count() {
            return overdue_in;
        }
        let origin = self.entries.iter().find(|entry| entry.id() == id)?.origin();
        let counts = Counts::of(self.admitted());
        let unused = self.oldest_unused(&counts);
        let victim = match unused {
            Some((id, since)) => (since.elapsed() >= UNUSED_TIMEOUT).then_some(id),
            None => self.beyond_its_share(&counts, origin),
        };
        let Some(victim) = victim else {
            let unused_in = unused.map(|(_, since)| UNUSED_TIMEOUT.saturating_sub(since.elapsed()));
            return unused_in.into_iter().chain(overdue_in).min();
        };
        let victim = self.entries.iter_mut().find(|entry| entry.id() == victim)?;
        tracing::info!(
            peer = %victim.origin().peer,
            "all connections are taken: this one is ended for another client \
             (--limit clients=N allows more)"
        );
        victim.end();
        self.disconnect_overdue(end_time)
    }

    /// Registers a task to be woken by the next change.
    pub fn register(&mut self, context: &Context<'_>) {
        if !self.waiters.iter().any(|waker| waker.will_wake(context.waker())) {
            self.waiters.push(context.waker().clone());
        }
    }

    /// Makes all registered tasks check again.
    pub fn wake(&mut self) {
        self.waiters.drain(..).for_each(Waker::wake);
    }

    fn admitted(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(|entry| !entry.is_waiting())
    }

    /// Whether one more connection from `origin` may wait. A waiting connection of another peer may
    /// be closed in its favor.
    fn may_wait(&mut self, origin: Origin) -> bool {
        let waiting = || self.entries.iter().filter(|entry| entry.is_waiting());
        if waiting().count() < MAX_WAITING {
            return true;
        }
        let counts = Counts::of(waiting());
        let newest = waiting().max_by_key(|entry| (counts.origin(entry.origin()), entry.id()));
        let Some(newest) = newest else { return false };
        let (id, count) = (newest.id(), counts.origin(newest.origin()));
        if count <= counts.origin(origin) + 1 {
            return false;
        }
        self.entries.iter_mut().filter(|entry| entry.id() == id).for_each(Entry::end);
        self.wake();
        true
    }

    /// Admits waiting connections up to the limit: first those of the socket with the fewest
    /// connections, of these those of the peer with the fewest, and of these the oldest.
    fn admit_waiting(&mut self, limit: usize) {
        while self.admitted().count() < limit {
            let counts = Counts::of(self.admitted());
            let order = |entry: &&mut Entry| {
                let origin = entry.origin();
                (counts.socket(origin.socket), counts.origin(origin), entry.id())
            };
            let waiting = self.entries.iter_mut().filter(|entry| entry.is_waiting());
            let Some(next) = waiting.min_by_key(order) else { return };
            next.admit();
        }
    }

    /// Disconnects the connections that were asked to end `end_time` ago. Returns the time until
    /// the next one is due.
    fn disconnect_overdue(&mut self, end_time: Duration) -> Option<Duration> {
        let mut next: Option<Duration> = None;
        for entry in &mut self.entries {
            let Some(requested) = entry.shutdown_requested_at() else { continue };
            let left = end_time.saturating_sub(requested.elapsed());
            if left.is_zero() {
                tracing::info!(
                    peer = %entry.origin().peer,
                    "a client that was to make room for another one is cut off: it did not take its \
                     replies within {end_time:?}"
                );
                entry.disconnect();
            } else {
                next = Some(next.map_or(left, |next| next.min(left)));
            }
        }
        next
    }

    /// The first connection to end among those without a request, and the time since which it has
    /// sent none.
    fn oldest_unused(&self, counts: &Counts) -> Option<(u64, Instant)> {
        let unused = self.admitted().filter_map(|entry| {
            let (is_through_handshake, since) = entry.unused_since()?;
            let held = counts.origin(entry.origin());
            Some(((is_through_handshake, Reverse(held), since), entry.id()))
        });
        unused.min().map(|((_, _, since), id)| (id, since))
    }

    /// A connection of a socket or peer with at least two more than `origin`: the one that has been
    /// idle longest, or the newest if all are busy.
    fn beyond_its_share(&self, counts: &Counts, origin: Origin) -> Option<u64> {
        let (&socket, &largest) = counts.sockets.iter().max_by_key(|(_, count)| **count)?;
        let is_other_socket = largest >= counts.socket(origin.socket) + 2;
        let socket = if is_other_socket { socket } else { origin.socket };
        let there = counts.origins.iter().filter(|(origin, _)| origin.socket == socket);
        let largest = there.map(|(_, &count)| count).max()?;
        if !is_other_socket && largest < counts.origin(origin) + 2 {
            return None;
        }
        let theirs = self.admitted().filter(|entry| {
            entry.origin().socket == socket && counts.origin(entry.origin()) == largest
        });
        theirs.max_by_key(|entry| order_of_ending(entry)).map(|entry| entry.id())
    }
}

/// The connection with the largest value is ended first.
fn order_of_ending(entry: &Entry) -> (Option<Duration>, u64) {
    if entry.is_in_transmission() { (entry.idle(), entry.id()) } else { (None, 0) }
}
