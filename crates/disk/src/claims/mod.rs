//! The tracker of changes in flight: it orders the overlaps that must be ordered, and no others.
//!
//! An unaligned write reads the blocks at its edges, changes some of their bytes and writes them
//! back. This would undo another write to the same blocks meanwhile. So an unaligned write excludes
//! every other write from the blocks that it touches: it starts after the writes in flight to these
//! blocks, and holds off later writes. Aligned writes share: two aligned writes never wait for each
//! other, even if they overlap (their order is up to the guest). Reads are not tracked.
//!
//! A claim is granted after all earlier claims that conflict with it have ended, so each claim is
//! granted in the end. A claim is dropped when the operation has ended. The operation may end after
//! the request's future was dropped, so the operation itself holds an exclusive claim: see
//! [`Claim::attach_to`].
//!
//! The cost of claims is bounded, because a client decides how many claims there are. A claim only
//! counts the claims that it waits for, and lists the claims that wait for it. Only the last
//! exclusive claim of each range is looked up, because that claim waits for the earlier ones. So n
//! unaligned writes to one block take n log n steps.

use std::future::poll_fn;
use std::ops::Deref;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use blockhouse_core::{ByteRange, IoVector};
use parking_lot::Mutex;

use self::conflicts::{ClaimId, Claims};

mod conflicts;

/// All claims of one kind on a layer: changes, or fetches from the backing file.
#[derive(Default)]
pub(crate) struct Tracker(Mutex<Claims>);

/// The right to write to a range, until it is dropped.
pub(crate) enum Claim<'a> {
    /// No claim is needed, because no change of this disk is ever exclusive.
    Untracked,
    /// Other writes may overlap the range.
    Shared { _guard: ClaimGuard<&'a Tracker> },
    /// No other write overlaps the range.
    Exclusive(Arc<ClaimGuard<Arc<Tracker>>>),
}

/// An entry in the tracker, removed when this is dropped.
pub(crate) struct ClaimGuard<T: Deref<Target = Tracker>> {
    tracker: T,
    id: ClaimId,
}

impl Claim<'_> {
    /// Makes an exclusive claim last until the operation that gets `vector` has ended, even if the
    /// request's future is dropped earlier. Reason: the operation may still write stale bytes
    /// around the request's own bytes.
    pub(crate) fn attach_to(&self, vector: IoVector) -> IoVector {
        match self {
            Self::Untracked | Self::Shared { .. } => vector,
            Self::Exclusive(guard) => vector.with_guard(Arc::clone(guard)),
        }
    }
}

impl Tracker {
    /// A shared claim, for aligned writes. Waits only for exclusive claims.
    pub(crate) async fn claim_shared(&self, range: ByteRange) -> Claim<'_> {
        let guard = ClaimGuard { tracker: self, id: self.0.lock().add_shared(range) };
        guard.granted().await;
        Claim::Shared { _guard: guard }
    }

    /// An exclusive claim. Waits for all earlier claims that overlap it.
    pub(crate) async fn claim_exclusive(self: &Arc<Self>, range: ByteRange) -> Claim<'static> {
        let id = self.0.lock().add_exclusive(range);
        let guard = ClaimGuard { tracker: Arc::clone(self), id };
        guard.granted().await;
        Claim::Exclusive(Arc::new(guard))
    }
}

impl<T: Deref<Target = Tracker>> ClaimGuard<T> {
    async fn granted(&self) {
        poll_fn(|context| self.poll_granted(context)).await;
    }

    fn poll_granted(&self, context: &Context<'_>) -> Poll<()> {
        self.tracker.0.lock().poll(self.id, context)
    }
}

impl<T: Deref<Target = Tracker>> Drop for ClaimGuard<T> {
    fn drop(&mut self) {
        let granted = self.tracker.0.lock().release(self.id);
        // Wakers are called without the lock, because a waker may run a task that takes the lock.
        granted.into_iter().for_each(Waker::wake);
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
            (pin!(tracker.claim_shared(range(0, 8))), pin!(tracker.claim_shared(range(4, 9))));
        let _first = poll(&mut one).expect("granted");
        assert!(poll(&mut two).is_some());
    }

    #[test]
    fn an_exclusive_claim_waits_for_what_is_in_flight_and_holds_off_what_comes() {
        let tracker = Arc::new(Tracker::default());
        let mut earlier = pin!(tracker.claim_shared(range(0, 4096)));
        let earlier = poll(&mut earlier).expect("granted");
        let mut exclusive = pin!(tracker.claim_exclusive(range(0, 8192)));
        assert!(poll(&mut exclusive).is_none());
        let mut later = pin!(tracker.claim_shared(range(4096, 8192)));
        assert!(poll(&mut later).is_none(), "the exclusive one came first");
        let mut beside = pin!(tracker.claim_shared(range(8192, 12288)));
        assert!(poll(&mut beside).is_some(), "no overlap");
        drop(earlier);
        let exclusive = poll(&mut exclusive).expect("its turn");
        assert!(poll(&mut later).is_none());
        drop(exclusive);
        assert!(poll(&mut later).is_some());
    }

    #[test]
    fn a_waiting_claim_that_is_dropped_delays_others_no_longer_than_itself() {
        let tracker = Arc::new(Tracker::default());
        let mut earlier = pin!(tracker.claim_shared(range(0, 1)));
        let earlier = poll(&mut earlier).expect("granted");
        let mut later = pin!(tracker.claim_shared(range(0, 1)));
        {
            let mut dropped = pin!(tracker.claim_exclusive(range(0, 1)));
            assert!(poll(&mut dropped).is_none());
            assert!(poll(&mut later).is_none());
        }
        drop(earlier);
        let later = poll(&mut later).expect("nothing is left that it waited for");
        let mut alone = pin!(tracker.claim_exclusive(range(0, 1)));
        assert!(poll(&mut alone).is_none());
        drop(later);
        assert!(poll(&mut alone).is_some());
    }

    #[test]
    fn the_end_of_a_dropped_claim_does_not_let_others_pass_what_it_waited_for() {
        let tracker = Arc::new(Tracker::default());
        let mut first = pin!(tracker.claim_exclusive(range(0, 1)));
        let first = poll(&mut first).expect("granted");
        let mut third = pin!(tracker.claim_exclusive(range(0, 1)));
        {
            let mut second = pin!(tracker.claim_exclusive(range(0, 1)));
            assert!(poll(&mut second).is_none() && poll(&mut third).is_none());
        }
        assert!(poll(&mut third).is_none(), "the first one is still there");
        drop(first);
        assert!(poll(&mut third).is_some());
    }

    #[test]
    fn many_exclusive_claims_of_one_block_take_few_steps_each() {
        const COUNT: u64 = 32 << 10;
        let tracker = Arc::new(Tracker::default());
        let mut claims: std::collections::VecDeque<_> =
            (0..COUNT).map(|_| Box::pin(tracker.claim_exclusive(range(0, 4096)))).collect();
        let granted = claims[0].as_mut().poll(&mut Context::from_waker(Waker::noop()));
        for claim in claims.iter_mut().skip(1) {
            assert!(poll(&mut claim.as_mut()).is_none(), "another one came first");
        }
        drop((claims.pop_front(), granted));
        while let Some(mut claim) = claims.pop_front() {
            drop(poll(&mut claim.as_mut()).expect("its turn"));
        }
        let steps = tracker.0.lock().steps();
        assert!(steps <= 8 * COUNT, "{steps} steps for {COUNT} claims");
    }

    #[test]
    fn a_protected_vector_keeps_the_claim() {
        let tracker = Arc::new(Tracker::default());
        let mut exclusive = pin!(tracker.claim_exclusive(range(0, 1)));
        let claim = poll(&mut exclusive).expect("granted");
        let vector = claim.attach_to(blockhouse_core::Buffer::new(1).lend());
        drop(claim);
        let mut next = pin!(tracker.claim_exclusive(range(0, 1)));
        assert!(poll(&mut next).is_none(), "the operation is not through");
        drop(vector);
        assert!(poll(&mut next).is_some());
    }
}
