//! Waiting for the operations that are in flight now, and not for those that begin later.
//!
//! Each operation holds an [`EpochGuard`]. [`Epochs::synchronize`] waits until every guard that
//! existed when it was called is dropped. Guards taken after the call has switched the epoch do
//! not delay the call, so the call ends under any load. Linux has the same as SRCU
//! (`srcu_read_lock`, `synchronize_srcu`).
//!
//! How it works:
//!
//! 1. There are two epochs, one of which is current. `entered` is one word with the number of the
//!    current epoch and the count of guards that it has issued. So a new guard takes one addition
//!    and knows its epoch.
//! 2. A dropped guard subtracts one from the balance of its epoch. While the epoch is current its
//!    balance is zero or negative.
//! 3. `synchronize` makes the other epoch current, and gets from the same exchange the number of
//!    guards that the old epoch has issued. It adds that number to the old epoch's balance, which
//!    is from then on the number of guards that still exist. The guard that brings the balance to
//!    zero wakes the waiter.
//! 4. If the future of `synchronize` is dropped before that, guards of the old epoch are left. The
//!    next call waits for them before it makes that epoch current again, so no balance ever mixes
//!    two generations of guards.

use super::Condvar;
use super::parts::{AtomicBool, AtomicI64, AtomicU64, Ordering};

/// The bit of `entered` that says which epoch is current; the bits below count its guards.
const EPOCH_SHIFT: u32 = 63;

/// Waits for the operations in flight now, not for later ones. Counts operations in two epochs (as
/// Linux SRCU).
///
/// A guard costs two atomic additions and no lock, and keeps no memory.
#[derive(Debug, Default)]
pub struct Epochs {
    entered: AtomicU64,
    balance: [AtomicI64; 2],
    drained: Condvar,
    /// Whether a task is in `synchronize`.
    is_synchronizing: AtomicBool,
    idle: Condvar,
}

/// One operation in flight, until this is dropped.
#[derive(Debug)]
pub struct EpochGuard<'a> {
    epochs: &'a Epochs,
    epoch: usize,
}

impl Epochs {
    /// A new value, with no operation in flight.
    pub fn new() -> Self {
        Self::default()
    }

    /// Begins an operation, in the current epoch.
    ///
    /// If a [`synchronize`](Self::synchronize) does not wait for this operation, the operation sees
    /// everything that the caller of `synchronize` did before the call.
    pub fn enter(&self) -> EpochGuard<'_> {
        let entered = self.entered.fetch_add(1, Ordering::Acquire);
        EpochGuard { epochs: self, epoch: epoch_of(entered) }
    }

    /// Waits until every operation that was in flight at the call has ended. What those operations
    /// did is visible to the caller afterwards. Several callers wait one after the other.
    pub async fn synchronize(&self) {
        let _turn = self.begin().await;
        let current = epoch_of(self.entered.load(Ordering::Relaxed));
        let next = 1 - current;
        self.drain(next).await;
        let entered = self.entered.swap((next as u64) << EPOCH_SHIFT, Ordering::AcqRel);
        let issued = entered & !(1 << EPOCH_SHIFT);
        self.balance[current].fetch_add(issued as i64, Ordering::AcqRel);
        self.drain(current).await;
    }

    /// Waits until no guard of an epoch that is not current exists.
    async fn drain(&self, epoch: usize) {
        let balance = &self.balance[epoch];
        self.drained.wait_until(|| (balance.load(Ordering::Acquire) == 0).then_some(())).await;
    }

    /// Waits until no other task is in `synchronize`.
    async fn begin(&self) -> Synchronizing<'_> {
        let begin = || (!self.is_synchronizing.swap(true, Ordering::Acquire)).then_some(());
        self.idle.wait_until(begin).await;
        Synchronizing(self)
    }
}

fn epoch_of(entered: u64) -> usize {
    (entered >> EPOCH_SHIFT) as usize
}

/// The one task that is in `synchronize`.
struct Synchronizing<'a>(&'a Epochs);

impl Drop for Synchronizing<'_> {
    fn drop(&mut self) {
        self.0.is_synchronizing.store(false, Ordering::Release);
        self.0.idle.notify_all();
    }
}

impl Drop for EpochGuard<'_> {
    fn drop(&mut self) {
        if self.epochs.balance[self.epoch].fetch_sub(1, Ordering::AcqRel) == 1 {
            self.epochs.drained.notify_all();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn poll(future: std::pin::Pin<&mut impl Future<Output = ()>>) -> Poll<()> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn only_operations_in_flight_at_the_call_are_waited_for() {
        let epochs = Epochs::new();
        let (earlier, another) = (epochs.enter(), epochs.enter());
        drop(epochs.enter());
        let mut synchronize = pin!(epochs.synchronize());
        assert!(poll(synchronize.as_mut()).is_pending());
        let _later = epochs.enter();
        drop(earlier);
        assert!(poll(synchronize.as_mut()).is_pending());
        drop(another);
        assert!(poll(synchronize.as_mut()).is_ready());
    }

    #[test]
    fn a_call_after_a_dropped_one_waits_for_both_epochs() {
        let epochs = Epochs::new();
        let old = epochs.enter();
        assert!(poll(pin!(epochs.synchronize())).is_pending());
        let young = epochs.enter();
        let mut synchronize = pin!(epochs.synchronize());
        drop(young);
        assert!(poll(synchronize.as_mut()).is_pending());
        drop(old);
        assert!(poll(synchronize.as_mut()).is_ready());
    }

    #[test]
    fn nothing_in_flight_is_no_wait() {
        let epochs = Epochs::new();
        for _ in 0..5 {
            assert!(poll(pin!(epochs.synchronize())).is_ready());
            drop(epochs.enter());
        }
    }

    #[test]
    fn two_callers_wait_one_after_the_other() {
        let epochs = Epochs::new();
        let first = epochs.enter();
        let (mut one, mut other) = (pin!(epochs.synchronize()), pin!(epochs.synchronize()));
        assert!(poll(one.as_mut()).is_pending());
        let second = epochs.enter();
        assert!(poll(other.as_mut()).is_pending());
        drop(first);
        assert!(poll(other.as_mut()).is_pending(), "the first caller has its turn");
        assert!(poll(one.as_mut()).is_ready());
        assert!(poll(other.as_mut()).is_pending(), "an operation that began before it was called");
        drop(second);
        assert!(poll(other.as_mut()).is_ready());
    }

    #[test]
    fn random_orders_wait_for_exactly_the_older_operations() {
        let mut state = 1u64;
        let mut next = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        for _ in 0..200 {
            let epochs = Epochs::new();
            let mut guards = Vec::new();
            for _ in 0..next(6) {
                guards.push(epochs.enter());
            }
            let mut older = guards.len();
            let mut synchronize = pin!(epochs.synchronize());
            loop {
                let is_ready = poll(synchronize.as_mut()).is_ready();
                assert_eq!(is_ready, older == 0);
                if is_ready {
                    break;
                }
                if next(3) == 0 {
                    guards.push(epochs.enter());
                }
                let at = next(guards.len() as u64) as usize;
                older -= usize::from(at < older);
                drop(guards.remove(at));
            }
        }
    }
}

/// Every interleaving of operations and `synchronize`. Compiled in lab/models.
#[cfg(all(test, loom))]
mod loom_model {
    use std::sync::Arc;

    use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use loom::thread;

    use super::Epochs;
    use crate::sync::loom_support::block_on;

    /// An object that operations look up. After it is unlinked and `synchronize` has returned, no
    /// operation uses it.
    #[derive(Default)]
    struct Place {
        epochs: Epochs,
        is_linked: AtomicBool,
        users: AtomicUsize,
    }

    #[test]
    fn no_operation_uses_what_was_unlinked_before_synchronize_returned() {
        loom::model(|| {
            let place = Arc::new(Place::default());
            place.is_linked.store(true, Ordering::Relaxed);
            let operation = {
                let place = Arc::clone(&place);
                thread::spawn(move || {
                    let _guard = place.epochs.enter();
                    // The object is found: it is in use until the guard is dropped.
                    if place.is_linked.load(Ordering::Relaxed) {
                        place.users.store(1, Ordering::Relaxed);
                        place.users.store(0, Ordering::Relaxed);
                        return true;
                    }
                    false
                })
            };
            place.is_linked.store(false, Ordering::Relaxed);
            block_on(place.epochs.synchronize());
            assert_eq!(place.users.load(Ordering::Relaxed), 0, "it is still in use");
            place.users.store(2, Ordering::Relaxed);
            operation.join().unwrap();
            assert_eq!(place.users.load(Ordering::Relaxed), 2, "it was used after that");
        });
    }

    /// The maximum number of forced thread switches in the model. Two are enough to show a lost
    /// wake-up; without a bound the model of two operations takes minutes.
    const SWITCHES: usize = 2;

    #[test]
    fn a_waiter_is_woken_by_the_last_of_two_operations() {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(SWITCHES);
        builder.check(|| {
            let place = Arc::new(Place::default());
            let threads = [(); 2].map(|()| {
                let place = Arc::clone(&place);
                thread::spawn(move || drop(place.epochs.enter()))
            });
            // If a wake-up is lost, loom reports that every thread waits.
            block_on(place.epochs.synchronize());
            block_on(place.epochs.synchronize());
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }
}
