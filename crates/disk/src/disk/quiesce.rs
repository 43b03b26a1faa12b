//! Quiescing: holds the guest's changes off while the whole image is changed.
//!
//! A change costs two atomic additions. Quiescing waits for the changes in flight; later changes
//! wait until the quiesced state ends. A change in flight may wait for a backing file that does not
//! respond. So quiescing has a limit: when the limit is reached, quiescing fails and changes
//! continue.

use std::pin::pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use async_lock::{Semaphore, SemaphoreGuard};
use blockhouse_core::sync::Condvar;
use futures_util::future::{Either, select};

/// The bit of the quiesced state. The bits below it count the changes in flight.
const QUIESCED: usize = 1 << (usize::BITS - 1);

/// See the module's page.
pub(crate) struct Quiesce {
    state: AtomicUsize,
    /// How often quiescing has begun.
    count: AtomicU64,
    resumed: Condvar,
    drained: Condvar,
    /// A semaphore with one permit, because `async_lock::Mutex` reads the clock when it is
    /// contended.
    one_at_a_time: Semaphore,
}

impl Default for Quiesce {
    fn default() -> Self {
        Self {
            state: AtomicUsize::new(0),
            count: AtomicU64::new(0),
            resumed: Condvar::new(),
            drained: Condvar::new(),
            one_at_a_time: Semaphore::new(1),
        }
    }
}

/// A change in flight, until the guard is dropped.
pub(crate) struct WriteGuard<'a>(&'a Quiesce);

/// The quiesced state, until the guard is dropped: no change is in flight, and none begins.
pub struct QuiescedGuard<'a> {
    quiesce: &'a Quiesce,
    _permit: SemaphoreGuard<'a>,
}

impl Quiesce {
    /// Begins a change. Waits while changes are held off.
    pub(crate) async fn begin_write(&self) -> WriteGuard<'_> {
        self.resumed.wait_until(|| self.try_begin_write()).await
    }

    /// As [`begin_write`](Self::begin_write), without waiting; `None` while changes are held off.
    pub(crate) fn try_begin_write(&self) -> Option<WriteGuard<'_>> {
        if self.state.fetch_add(1, Ordering::SeqCst) & QUIESCED == 0 {
            return Some(WriteGuard(self));
        }
        self.end_write();
        None
    }

    fn end_write(&self) {
        if self.state.fetch_sub(1, Ordering::SeqCst) == QUIESCED + 1 {
            self.drained.notify_all();
        }
    }

    /// How often changes were held off so far. If the count is the same later, no change of the
    /// whole image has begun in between.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }

    /// Holds new changes off and waits until none is in flight. Returns `None` if `limit` completes
    /// first; `limit` is polled only once changes are held off.
    pub(crate) async fn quiesce(
        &self,
        limit: impl Future<Output = ()>,
    ) -> Option<QuiescedGuard<'_>> {
        let permit = self.one_at_a_time.acquire().await;
        let guard = QuiescedGuard { quiesce: self, _permit: permit };
        self.state.fetch_or(QUIESCED, Ordering::SeqCst);
        self.count.fetch_add(1, Ordering::SeqCst);
        let is_drained = || (self.state.load(Ordering::SeqCst) == QUIESCED).then_some(());
        match select(pin!(self.drained.wait_until(is_drained)), pin!(limit)).await {
            Either::Left(_) => Some(guard),
            Either::Right(_) => None,
        }
    }
}

impl Drop for WriteGuard<'_> {
    fn drop(&mut self) {
        self.0.end_write();
    }
}

impl Drop for QuiescedGuard<'_> {
    fn drop(&mut self) {
        self.quiesce.state.fetch_and(!QUIESCED, Ordering::SeqCst);
        self.quiesce.resumed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn poll<F: Future>(future: &mut std::pin::Pin<&mut F>) -> Option<F::Output> {
        match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn quiescing_waits_for_changes_in_flight_and_holds_off_new_ones() {
        let quiesce = Quiesce::default();
        let first = poll(&mut pin!(quiesce.begin_write())).expect("not quiesced");
        let mut quiescing = pin!(quiesce.quiesce(pending()));
        assert!(poll(&mut quiescing).is_none(), "a change is in flight");
        let mut later = pin!(quiesce.begin_write());
        assert!(poll(&mut later).is_none(), "quiescing");
        drop(first);
        let guard = poll(&mut quiescing).flatten().expect("no change is in flight");
        assert!(poll(&mut later).is_none());
        drop(guard);
        assert!(poll(&mut later).is_some());
    }

    #[test]
    fn a_dropped_quiesce_lets_changes_go_on() {
        let quiesce = Quiesce::default();
        let _inside = poll(&mut pin!(quiesce.begin_write())).expect("not quiesced");
        {
            let mut dropped = pin!(quiesce.quiesce(pending()));
            assert!(poll(&mut dropped).is_none());
        }
        assert!(poll(&mut pin!(quiesce.begin_write())).is_some());
    }

    #[test]
    fn at_its_limit_a_quiesce_lets_changes_go_on() {
        let quiesce = Quiesce::default();
        let inside = poll(&mut pin!(quiesce.begin_write())).expect("not quiesced");
        let limited = poll(&mut pin!(quiesce.quiesce(ready(())))).expect("its limit is there");
        assert!(limited.is_none(), "a change is in flight");
        assert!(poll(&mut pin!(quiesce.begin_write())).is_some());
        drop(inside);
        let quiesced = poll(&mut pin!(quiesce.quiesce(ready(())))).expect("its limit is there");
        assert!(quiesced.is_some(), "nothing was to be waited for");
    }
}
