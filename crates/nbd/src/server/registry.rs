//! Who is connected: the limit on connections, and their orderly end.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use blockhouse_engine::{Stream, sleep};
use parking_lot::Mutex;

use crate::session::Leave;

/// A handshake that took this long may be ended to make room for another client.
const PATIENCE: Duration = Duration::from_secs(1);

/// All connections of a server. Used when one comes or goes, never while it works.
pub struct Registry {
    state: Mutex<State>,
    most: usize,
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
    phase: Phase,
}

enum Phase {
    /// In the handshake since then.
    Handshake(Instant),
    /// Its end has been asked for.
    Ending,
    Transmission(Arc<Leave>),
}

/// Whether a further connection may come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// It may.
    Free,
    /// It may not, and none ever will: the server ends.
    Draining,
}

impl Registry {
    /// For `most` connections at once.
    pub fn new(most: usize) -> Self {
        let state = State { entries: Vec::new(), next: 0, draining: false, waiters: Vec::new() };
        Self { state: Mutex::new(state), most }
    }

    /// Waits until there is room, made if need be by ending the oldest handshake once it takes
    /// long: so clients that connect and say nothing cannot keep others out.
    pub async fn room(&self) -> Room {
        let mut nap = None;
        poll_fn(|context| {
            loop {
                let mut state = self.state.lock();
                let patience = match state.look(self.most) {
                    Look::Room(room) => return Poll::Ready(room),
                    Look::Full(patience) => patience,
                };
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

    /// Takes a connection in, at the start of its handshake. `None` when there is no room: the
    /// caller closes it.
    pub fn enter(self: &Arc<Self>, stream: &Stream) -> Option<Seat> {
        let mut state = self.state.lock();
        if state.draining || state.entries.len() >= self.most {
            return None;
        }
        let id = state.next;
        state.next += 1;
        let phase = Phase::Handshake(Instant::now());
        state.entries.push(Entry { id, stream: stream.clone(), phase });
        Some(Seat { registry: Arc::clone(self), id })
    }

    /// Asks all connections to end: those in the handshake at once, the others when they have
    /// finished what they have in flight. No more are taken in.
    pub fn drain(&self) {
        let mut state = self.state.lock();
        state.draining = true;
        for entry in &mut state.entries {
            match &entry.phase {
                Phase::Transmission(leave) => leave.ask(),
                Phase::Handshake(_) => {
                    entry.stream.shutdown();
                    entry.phase = Phase::Ending;
                }
                Phase::Ending => {}
            }
        }
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

enum Look {
    Room(Room),
    /// Until somebody leaves; in this time somebody can be made to, if a time is given.
    Full(Option<Duration>),
}

impl State {
    fn look(&mut self, most: usize) -> Look {
        if self.draining {
            return Look::Room(Room::Draining);
        }
        if self.entries.len() < most {
            return Look::Room(Room::Free);
        }
        let handshakes = self.entries.iter_mut().filter_map(|entry| match entry.phase {
            Phase::Handshake(since) => Some((since, entry)),
            Phase::Ending | Phase::Transmission(_) => None,
        });
        let Some((since, entry)) = handshakes.min_by_key(|(since, _)| *since) else {
            return Look::Full(None);
        };
        let left = PATIENCE.saturating_sub(since.elapsed());
        if left.is_zero() {
            entry.phase = Phase::Ending;
            entry.stream.shutdown();
            return Look::Full(None);
        }
        Look::Full(Some(left))
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
    /// The handshake is over. What asks the transmission phase to end.
    pub fn transmit(&self) -> Arc<Leave> {
        let leave = Arc::new(Leave::default());
        let mut state = self.registry.state.lock();
        let draining = state.draining;
        let entry = state.entries.iter_mut().find(|entry| entry.id == self.id);
        // It is there until the seat is dropped.
        if let Some(entry) = entry {
            entry.phase = Phase::Transmission(Arc::clone(&leave));
        }
        if draining {
            leave.ask();
        }
        leave
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut state = self.registry.state.lock();
        state.entries.retain(|entry| entry.id != self.id);
        state.wake();
    }
}
