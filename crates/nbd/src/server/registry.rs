//! Who is connected: the limit on connections, who makes room for whom, and the orderly end.
//!
//! Guarantee: the clients of a socket are not kept out by those of other sockets. At the same socket, a
//! client that holds few connections is not kept out by a process or host that holds many, whether those
//! are silent, idle or busy. While seats are free no client is disconnected for being idle, unless the limit
//! `idle` is set: a guest may have nothing to do for days. When all are taken, room is made for a client that
//! waits, in this order:
//!
//! 1. by a connection that has not asked for anything yet, once it is a second old: one in its handshake
//!    before one after it, of those one of the peer that has most of them, of those the oldest;
//! 2. by a connection of the socket, or else at the same socket of the [`Peer`], that holds most of them,
//!    two more at least than the one that waits: that which has been idle for longest, among all peers that
//!    hold as many.
//!
//! Otherwise the client waits, in a queue of [`MAX_WAITING`].
//!
//! The socket is the unit of isolation: at one socket, a connection that was used makes no room for a client
//! whose process or host would then hold as many. So a program that forks, with one used connection in each
//! child, can keep other clients of its own socket out. Reason: children that idle look like the guests of
//! a host, each a process with one connection. To end the one that is idle for longest would break the
//! disk of a guest for a stranger, who could go on to the next guest. And who may connect to a socket may
//! read what it exports, and write what is not read-only, which is worse than to keep others out. The owner
//! and mode of a Unix socket, or a firewall, say who may connect: clients that must not keep one another
//! out get sockets of their own.
//!
//! A connection that is asked to leave finishes what it has in flight and sends the replies. While a client
//! waits for its seat it has at most the time that [`Registry::new`] is told. Then it is cut off, also one
//! that goes on receiving: a slow receiver would keep the seat past the time that a client may wait.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use blockhouse_engine::{Stream, sleep};
use parking_lot::Mutex;

use super::peer::Peer;
use crate::session::{Activity, Leave};

/// A connection that asked for nothing for this long may be ended to make room for another client.
const PATIENCE: Duration = Duration::from_secs(1);

/// Connections beyond the limit that wait for a seat. Further ones are closed, those first whose peer
/// has most of them waiting.
pub const MAX_WAITING: usize = 64;

/// All connections of a server. Used when one comes or goes, never while it works.
pub struct Registry {
    state: Mutex<State>,
    seats: usize,
    leave_limit: Duration,
}

struct State {
    entries: Vec<Entry>,
    next: u64,
    draining: bool,
    /// Who waits for a change.
    waiters: Vec<Waker>,
}

struct Entry {
    id: u64,
    stream: Stream,
    origin: Origin,
    phase: Phase,
}

/// Where a connection comes from: what shares of seats are counted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Origin {
    /// The listening socket.
    pub socket: usize,
    /// Who connected.
    pub peer: Peer,
}

enum Phase {
    /// For a seat.
    Waiting,
    /// In the handshake since then.
    Handshake(Instant),
    /// It was asked to leave then; `None` where its stream is shut down.
    Ending(Option<Instant>),
    Transmission {
        since: Instant,
        leave: Arc<Leave>,
        activity: Arc<Activity>,
    },
}

impl Entry {
    /// Whether it counts against the limit.
    fn is_seated(&self) -> bool {
        !matches!(self.phase, Phase::Waiting)
    }

    /// Since when it could have asked for something and did not; whether it is through its handshake.
    fn unused_since(&self) -> Option<(bool, Instant)> {
        match &self.phase {
            Phase::Handshake(since) => Some((false, *since)),
            Phase::Transmission { since, activity, .. } if activity.is_unused() => {
                Some((true, *since))
            }
            _ => None,
        }
    }

    /// Begins its end. A request that was received already is finished and answered.
    fn end(&mut self) {
        match &self.phase {
            Phase::Transmission { leave, .. } => {
                leave.ask();
                self.phase = Phase::Ending(Some(Instant::now()));
            }
            Phase::Handshake(_) | Phase::Waiting => self.cut(),
            Phase::Ending(_) => {}
        }
    }

    /// Ends it at once. Requests in flight finish without replies.
    fn cut(&mut self) {
        self.stream.shutdown();
        self.phase = Phase::Ending(None);
    }
}

impl Registry {
    /// For `seats` connections at once, at least one. A connection that is asked to leave for a client that
    /// waits is cut off after `leave_limit`.
    pub fn new(seats: usize, leave_limit: Duration) -> Self {
        let state = State { entries: Vec::new(), next: 0, draining: false, waiters: Vec::new() };
        Self { state: Mutex::new(state), seats: seats.max(1), leave_limit }
    }

    /// Takes a connection in: to a seat, or to wait for one. `None` when the server ends, or too many
    /// wait: the caller closes it.
    pub fn enter(self: &Arc<Self>, stream: &Stream, origin: Origin) -> Option<Seat> {
        let mut state = self.state.lock();
        if state.draining {
            return None;
        }
        let is_free = state.entries.len() < self.seats;
        if !is_free && !state.may_wait(origin) {
            return None;
        }
        let id = state.next;
        state.next += 1;
        let phase = if is_free { Phase::Handshake(Instant::now()) } else { Phase::Waiting };
        state.entries.push(Entry { id, stream: stream.clone(), origin, phase });
        Some(Seat { registry: Arc::clone(self), id })
    }

    /// Asks all connections to end: those in the handshake at once, the others when they have
    /// finished what they have in flight. No more are taken in.
    pub fn drain(&self) {
        let mut state = self.state.lock();
        state.draining = true;
        state.entries.iter_mut().for_each(Entry::end);
        state.wake();
    }

    /// Cuts all connections off. What they have in flight is finished without replies.
    pub fn cut(&self) {
        self.state.lock().entries.iter().for_each(|entry| entry.stream.shutdown());
    }

    /// Waits until there are no connections.
    pub async fn empty(&self) {
        poll_fn(|context| self.poll(context, |state| state.entries.is_empty())).await;
    }

    /// Waits for the start of the drain.
    pub async fn draining(&self) {
        poll_fn(|context| self.poll(context, |state| state.draining)).await;
    }

    fn poll(&self, context: &Context<'_>, over: impl Fn(&State) -> bool) -> Poll<()> {
        let mut state = self.state.lock();
        if over(&state) {
            return Poll::Ready(());
        }
        state.register(context);
        Poll::Pending
    }
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
        for Entry { origin, .. } in entries {
            *counts.sockets.entry(origin.socket).or_default() += 1;
            *counts.origins.entry(*origin).or_default() += 1;
        }
        counts
    }

    fn socket(&self, socket: usize) -> usize {
        self.sockets.get(&socket).copied().unwrap_or(0)
    }

    fn origin(&self, origin: &Origin) -> usize {
        self.origins.get(origin).copied().unwrap_or(0)
    }
}

impl State {
    /// Whether one more may wait from there. One of another peer's that waits may be closed for it.
    fn may_wait(&mut self, origin: Origin) -> bool {
        let waiting = || self.entries.iter().filter(|entry| !entry.is_seated());
        if waiting().count() < MAX_WAITING {
            return true;
        }
        let counts = Counts::of(waiting());
        let newest = waiting().max_by_key(|entry| (counts.origin(&entry.origin), entry.id));
        let Some((id, most)) = newest.map(|entry| (entry.id, counts.origin(&entry.origin))) else {
            return false;
        };
        if most <= counts.origin(&origin) + 1 {
            return false;
        }
        self.entries.iter_mut().filter(|entry| entry.id == id).for_each(Entry::end);
        self.wake();
        true
    }

    /// Gives free seats to those that wait: first to who has fewest, then to who came first.
    fn seat(&mut self, seats: usize) {
        while self.seated().count() < seats {
            let counts = Counts::of(self.seated());
            let order = |entry: &&mut Entry| {
                (counts.socket(entry.origin.socket), counts.origin(&entry.origin), entry.id)
            };
            let waiting = self.entries.iter_mut().filter(|entry| !entry.is_seated());
            let Some(next) = waiting.min_by_key(order) else { return };
            next.phase = Phase::Handshake(Instant::now());
        }
    }

    fn seated(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(|entry| entry.is_seated())
    }

    /// Ends a connection for the one with this id, which waits, unless enough are ending already. If none
    /// can be ended now: in what time to ask again, if it can be said. One that was asked to leave
    /// `leave_limit` ago is cut off.
    fn make_room(&mut self, id: u64, leave_limit: Duration) -> Option<Duration> {
        let cut_in = self.cut_overdue(leave_limit);
        let ending = self.seated().filter(|entry| matches!(entry.phase, Phase::Ending(_))).count();
        if ending >= self.entries.len() - self.seated().count() {
            return cut_in;
        }
        let waits = self.entries.iter().find(|entry| entry.id == id)?;
        let counts = Counts::of(self.seated());
        let unused = self.oldest_unused(&counts);
        let victim = match unused {
            Some((id, since)) => (since.elapsed() >= PATIENCE).then_some(id),
            None => self.beyond_its_share(&counts, waits.origin),
        };
        let Some(victim) = victim else {
            let patience = unused.map(|(_, since)| PATIENCE.saturating_sub(since.elapsed()));
            return patience.into_iter().chain(cut_in).min();
        };
        let victim = self.entries.iter_mut().find(|entry| entry.id == victim)?;
        tracing::info!(
            peer = %victim.origin.peer,
            "all connections are taken: this one is ended for another client \
             (--limit clients=N allows more)"
        );
        victim.end();
        self.cut_overdue(leave_limit)
    }

    /// Cuts off what was asked to leave `limit` ago. In what time the next one is due.
    fn cut_overdue(&mut self, limit: Duration) -> Option<Duration> {
        let mut next: Option<Duration> = None;
        for entry in &mut self.entries {
            let Phase::Ending(Some(asked)) = entry.phase else { continue };
            let left = limit.saturating_sub(asked.elapsed());
            if left.is_zero() {
                tracing::info!(
                    peer = %entry.origin.peer,
                    "a client that was to make room for another one is cut off: it did not take its \
                     replies within {limit:?}"
                );
                entry.cut();
            } else {
                next = Some(next.map_or(left, |next| next.min(left)));
            }
        }
        next
    }

    fn oldest_unused(&self, counts: &Counts) -> Option<(u64, Instant)> {
        let unused = self.seated().filter_map(|entry| {
            let (is_through, since) = entry.unused_since()?;
            let held = counts.origin(&entry.origin);
            Some(((is_through, std::cmp::Reverse(held), since), entry.id))
        });
        unused.min().map(|((_, _, since), id)| (id, since))
    }

    /// A connection of a socket or peer that has two more at least than `origin`: the one that has been
    /// idle for longest, or the newest where all are busy.
    fn beyond_its_share(&self, counts: &Counts, origin: Origin) -> Option<u64> {
        let (&socket, &most) = counts.sockets.iter().max_by_key(|(_, count)| **count)?;
        let is_other_socket = most >= counts.socket(origin.socket) + 2;
        let socket = if is_other_socket { socket } else { origin.socket };
        let there = counts.origins.iter().filter(|(origin, _)| origin.socket == socket);
        let most = there.map(|(_, &count)| count).max()?;
        if !is_other_socket && most < counts.origin(&origin) + 2 {
            return None;
        }
        let is_largest = |origin| counts.origin(origin) == most;
        let theirs = self
            .seated()
            .filter(|entry| entry.origin.socket == socket && is_largest(&entry.origin));
        let order = |entry: &&Entry| match &entry.phase {
            Phase::Transmission { activity, .. } => (activity.idle(), entry.id),
            _ => (None, 0),
        };
        theirs.max_by_key(order).map(|entry| entry.id)
    }

    fn register(&mut self, context: &Context<'_>) {
        if !self.waiters.iter().any(|waker| waker.will_wake(context.waker())) {
            self.waiters.push(context.waker().clone());
        }
    }

    fn wake(&mut self) {
        self.waiters.drain(..).for_each(Waker::wake);
    }
}

/// The place of one connection in the registry, until it is dropped.
pub struct Seat {
    registry: Arc<Registry>,
    id: u64,
}

impl Seat {
    /// Waits for a seat, made if need be by ending another connection. False when there will be none.
    pub async fn taken(&self) -> bool {
        let mut nap = None;
        poll_fn(|context| {
            loop {
                let mut state = self.registry.state.lock();
                match state.entries.iter().find(|entry| entry.id == self.id).map(|own| &own.phase) {
                    Some(Phase::Handshake(_)) => return Poll::Ready(true),
                    Some(Phase::Waiting) => {}
                    _ => return Poll::Ready(false),
                }
                let patience = state.make_room(self.id, self.registry.leave_limit);
                state.register(context);
                drop(state);
                let Some(patience) = patience else { return Poll::Pending };
                if Pin::new(nap.insert(sleep(patience))).poll(context).is_pending() {
                    return Poll::Pending;
                }
            }
        })
        .await
    }

    /// The handshake is over. What asks the transmission phase to end.
    pub fn transmit(&self, activity: &Arc<Activity>) -> Arc<Leave> {
        let leave = Arc::new(Leave::default());
        let mut state = self.registry.state.lock();
        let entry = state.entries.iter_mut().find(|entry| entry.id == self.id);
        // It is there until the seat is dropped.
        if let Some(entry) = entry {
            match entry.phase {
                // Asked to end while its last option was answered.
                Phase::Ending(_) => leave.ask(),
                _ => {
                    entry.phase = Phase::Transmission {
                        since: Instant::now(),
                        leave: Arc::clone(&leave),
                        activity: Arc::clone(activity),
                    };
                }
            }
        }
        leave
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut state = self.registry.state.lock();
        state.entries.retain(|entry| entry.id != self.id);
        if state.entries.len() >= self.registry.seats {
            state.seat(self.registry.seats);
        }
        state.wake();
    }
}

#[cfg(test)]
mod tests;
