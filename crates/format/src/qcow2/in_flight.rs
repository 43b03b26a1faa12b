//! What may still be under way, and waiting for its end.
//!
//! Writes of tables: a round whose future is dropped leaves its writes to end by themselves. Another write of the same
//! table must not be overtaken by them, so the next round waits until they have.
//!
//! Reads of places: a place that no table refers to any more must not get a new owner while a read
//! that looked it up before is under way.
//!
//! Data on its way for durable writes: a round that waits for it serves them, too.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use event_listener::{Event, EventListener};
use parking_lot::Mutex;

/// Counts operations. Clones count together.
#[derive(Clone, Default)]
pub(crate) struct InFlight(Arc<Count>);

#[derive(Default)]
struct Count {
    underway: AtomicUsize,
    ended: Event,
}

/// One operation, until this is dropped.
pub(crate) struct Underway(Arc<Count>);

impl InFlight {
    pub(crate) fn enter(&self) -> Underway {
        self.0.underway.fetch_add(1, Ordering::SeqCst);
        Underway(Arc::clone(&self.0))
    }

    /// What tells of the moment when none is under way, unless it is now.
    pub(crate) fn end(&self) -> Option<EventListener> {
        let ended = self.0.ended.listen();
        (self.0.underway.load(Ordering::SeqCst) > 0).then_some(ended)
    }

    /// Waits until none is under way.
    pub(crate) async fn ended(&self) {
        while let Some(ended) = self.wait() {
            ended.await;
        }
    }

    /// What to wait for before looking again; `None` when none is under way.
    pub(crate) fn wait(&self) -> Option<EventListener> {
        let is_busy = || self.0.underway.load(Ordering::SeqCst) > 0;
        if !is_busy() {
            return None;
        }
        let ended = self.0.ended.listen();
        is_busy().then_some(ended)
    }
}

/// Counts operations in two epochs, so that those of the old one come to an end although new ones begin.
#[derive(Default)]
pub(crate) struct Epochs {
    epochs: [InFlight; 2],
    now: Mutex<usize>,
}

impl Epochs {
    pub(crate) fn enter(&self) -> Underway {
        let now = self.now.lock();
        self.epochs[*now].enter()
    }

    /// Waits until the operations that have begun so far are through. One waiter at a time.
    pub(crate) async fn elapsed(&self) {
        let old = *self.now.lock();
        let new = 1 - old;
        // A waiter that was dropped may have left some there.
        self.epochs[new].ended().await;
        *self.now.lock() = new;
        self.epochs[old].ended().await;
    }
}

impl Drop for Underway {
    fn drop(&mut self) {
        if self.0.underway.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.ended.notify(usize::MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    #[test]
    fn a_waiter_waits_for_what_began_before_it_only() {
        let operations = Epochs::default();
        let mut context = Context::from_waker(Waker::noop());
        let before = operations.enter();
        let mut elapsed = pin!(operations.elapsed());
        assert!(elapsed.as_mut().poll(&mut context).is_pending());
        let _after = operations.enter();
        drop(before);
        assert_eq!(elapsed.as_mut().poll(&mut context), Poll::Ready(()));
    }

    #[test]
    fn a_waiter_after_one_that_gave_up_waits_for_both_epochs() {
        let operations = Epochs::default();
        let mut context = Context::from_waker(Waker::noop());
        let old = operations.enter();
        assert!(pin!(operations.elapsed()).poll(&mut context).is_pending());
        let young = operations.enter();
        let mut elapsed = pin!(operations.elapsed());
        drop(young);
        assert!(elapsed.as_mut().poll(&mut context).is_pending());
        drop(old);
        assert_eq!(elapsed.as_mut().poll(&mut context), Poll::Ready(()));
    }
}
