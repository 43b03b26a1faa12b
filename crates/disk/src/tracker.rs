//! The request tracker: overlaps that must be ordered are ordered, nothing else waits.
//!
//! An unaligned write reads the blocks at its edges, changes some of their bytes and writes them
//! back. Whatever else is written to those blocks meanwhile would be undone. So it excludes every
//! other write from the blocks it touches: it starts after those in flight there and holds off those
//! that come later. Aligned writes share: two of them never wait for one another, not even where
//! they overlap (their order is for the guest to make). Reads are not tracked.
//!
//! Claims are granted in the order in which they came, so nobody waits for ever. A claim is dropped
//! when the operation has ended. For an exclusive one that may be later than its request's future is
//! dropped: the operation itself carries it, see [`Claim::protect`].

use std::future::poll_fn;
use std::ops::Deref;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use blockhouse_core::{ByteRange, IoVector};
use parking_lot::Mutex;
use slab::Slab;
use smallvec::SmallVec;

/// All claims of a disk.
#[derive(Default)]
pub(crate) struct Tracker(Mutex<Claims>);

#[derive(Default)]
struct Claims {
    entries: Slab<Entry>,
    /// How many of the entries are exclusive, granted or waiting: with none, nobody waits.
    exclusive: usize,
    /// How many have ever come.
    arrivals: u64,
}

struct Entry {
    range: ByteRange,
    mode: Mode,
    arrival: u64,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Shared,
    Exclusive,
}

enum State {
    Granted,
    Waiting(Waker),
}

/// The right to write to a range, until it is dropped.
pub(crate) enum Claim<'a> {
    /// Nothing is ever exclusive on this disk.
    Untracked,
    /// Together with other writes.
    Shared { _seat: Seat<&'a Tracker> },
    /// Alone.
    Exclusive(Arc<Seat<Arc<Tracker>>>),
}

/// An entry in the tracker; leaves it when dropped.
pub(crate) struct Seat<T: Deref<Target = Tracker>> {
    tracker: T,
    key: usize,
}

impl Claim<'_> {
    /// Makes an exclusive claim last until the operation that gets `vector` has ended, even when
    /// the request is dropped before: it may yet write stale bytes of its neighbours.
    pub(crate) fn protect(&self, vector: IoVector) -> IoVector {
        match self {
            Self::Untracked | Self::Shared { .. } => vector,
            Self::Exclusive(seat) => vector.guarded_by(Arc::clone(seat)),
        }
    }
}

impl Tracker {
    /// A claim beside others, for aligned writes. Waits only for exclusive ones.
    pub(crate) async fn share(&self, range: ByteRange) -> Claim<'_> {
        let seat = Seat { tracker: self, key: self.0.lock().arrive(range, Mode::Shared) };
        seat.granted().await;
        Claim::Shared { _seat: seat }
    }

    /// A claim that overlaps no other.
    pub(crate) async fn exclude(self: &Arc<Self>, range: ByteRange) -> Claim<'static> {
        let key = self.0.lock().arrive(range, Mode::Exclusive);
        let seat = Seat { tracker: Arc::clone(self), key };
        seat.granted().await;
        Claim::Exclusive(Arc::new(seat))
    }
}

impl<T: Deref<Target = Tracker>> Seat<T> {
    async fn granted(&self) {
        poll_fn(|context| self.tracker.0.lock().poll(self.key, context)).await;
    }
}

impl<T: Deref<Target = Tracker>> Drop for Seat<T> {
    fn drop(&mut self) {
        let next = self.tracker.0.lock().leave(self.key);
        next.into_iter().for_each(Waker::wake);
    }
}

impl Claims {
    fn arrive(&mut self, range: ByteRange, mode: Mode) -> usize {
        let arrival = self.arrivals;
        self.arrivals += 1;
        self.exclusive += usize::from(mode == Mode::Exclusive);
        // The waker is put in by the first poll, which follows at once.
        let state = match self.exclusive {
            0 => State::Granted,
            _ => State::Waiting(Waker::noop().clone()),
        };
        let key = self.entries.insert(Entry { range, mode, arrival, state });
        if self.exclusive > 0 && !self.is_blocked(key) {
            self.entries[key].state = State::Granted;
        }
        key
    }

    fn poll(&mut self, key: usize, context: &Context<'_>) -> Poll<()> {
        match &mut self.entries[key].state {
            State::Granted => Poll::Ready(()),
            State::Waiting(waker) => {
                waker.clone_from(context.waker());
                Poll::Pending
            }
        }
    }

    /// Whether a claim that came earlier stands in the way.
    fn is_blocked(&self, key: usize) -> bool {
        let one = &self.entries[key];
        self.entries.iter().any(|(_, other)| {
            other.arrival < one.arrival
                && (one.mode == Mode::Exclusive || other.mode == Mode::Exclusive)
                && other.range.overlaps(one.range)
        })
    }

    /// Takes the entry out; answers whom to wake.
    fn leave(&mut self, key: usize) -> SmallVec<[Waker; 4]> {
        let gone = self.entries.remove(key);
        let mut woken = SmallVec::new();
        if self.exclusive == 0 {
            return woken;
        }
        self.exclusive -= usize::from(gone.mode == Mode::Exclusive);
        let is_candidate = |entry: &Entry| {
            matches!(entry.state, State::Waiting(_)) && entry.range.overlaps(gone.range)
        };
        let candidates: SmallVec<[usize; 8]> = self
            .entries
            .iter()
            .filter(|(_, entry)| is_candidate(entry))
            .map(|(key, _)| key)
            .collect();
        for key in candidates {
            if !self.is_blocked(key)
                && let State::Waiting(waker) =
                    std::mem::replace(&mut self.entries[key].state, State::Granted)
            {
                woken.push(waker);
            }
        }
        woken
    }
}

#[cfg(test)]
mod tests {
    use std::pin::{Pin, pin};

    use super::*;

    fn range(start: u64, end: u64) -> ByteRange {
        ByteRange::between(start, end)
    }

    fn poll<'a>(future: &mut Pin<&mut impl Future<Output = Claim<'a>>>) -> Option<Claim<'a>> {
        match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(claim) => Some(claim),
            Poll::Pending => None,
        }
    }

    #[test]
    fn shared_claims_never_wait_for_one_another() {
        let tracker = Arc::new(Tracker::default());
        let (mut one, mut two) =
            (pin!(tracker.share(range(0, 8))), pin!(tracker.share(range(4, 9))));
        let _first = poll(&mut one).expect("granted");
        assert!(poll(&mut two).is_some());
    }

    #[test]
    fn an_exclusive_claim_waits_for_what_is_in_flight_and_holds_off_what_comes() {
        let tracker = Arc::new(Tracker::default());
        let mut earlier = pin!(tracker.share(range(0, 4096)));
        let earlier = poll(&mut earlier).expect("granted");
        let mut exclusive = pin!(tracker.exclude(range(0, 8192)));
        assert!(poll(&mut exclusive).is_none());
        let mut later = pin!(tracker.share(range(4096, 8192)));
        assert!(poll(&mut later).is_none(), "the exclusive one came first");
        let mut beside = pin!(tracker.share(range(8192, 12288)));
        assert!(poll(&mut beside).is_some(), "no overlap");
        drop(earlier);
        let exclusive = poll(&mut exclusive).expect("its turn");
        assert!(poll(&mut later).is_none());
        drop(exclusive);
        assert!(poll(&mut later).is_some());
    }

    #[test]
    fn a_waiting_claim_that_is_dropped_lets_the_next_one_pass() {
        let tracker = Arc::new(Tracker::default());
        let mut earlier = pin!(tracker.share(range(0, 1)));
        let _earlier = poll(&mut earlier).expect("granted");
        let mut later = pin!(tracker.share(range(0, 1)));
        {
            let mut given_up = pin!(tracker.exclude(range(0, 1)));
            assert!(poll(&mut given_up).is_none());
            assert!(poll(&mut later).is_none());
        }
        assert!(poll(&mut later).is_some());
        assert_eq!(tracker.0.lock().exclusive, 0);
    }

    #[test]
    fn a_protected_vector_keeps_the_claim() {
        let tracker = Arc::new(Tracker::default());
        let mut exclusive = pin!(tracker.exclude(range(0, 1)));
        let claim = poll(&mut exclusive).expect("granted");
        let vector = claim.protect(blockhouse_core::Buffer::new(1).lend());
        drop(claim);
        let mut next = pin!(tracker.exclude(range(0, 1)));
        assert!(poll(&mut next).is_none(), "the operation is not through");
        drop(vector);
        assert!(poll(&mut next).is_some());
    }
}
