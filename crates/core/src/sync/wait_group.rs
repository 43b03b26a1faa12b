//! Waiting until nothing is in flight.

use std::sync::Arc;

use super::Condvar;
use super::parts::{AtomicUsize, EventListener, Ordering};

/// Counts operations in flight, and lets tasks wait until all have ended. Clones share one count.
///
/// Use it where the task that waits also keeps new operations from beginning. If they continue to
/// begin, use [`Epochs`](super::Epochs), which waits for the older ones only.
#[derive(Clone, Debug, Default)]
pub struct WaitGroup(Arc<Count>);

#[derive(Debug, Default)]
struct Count {
    in_flight: AtomicUsize,
    drained: Condvar,
}

/// One operation in flight, until this is dropped. It owns a reference to the count, so that it can
/// be stored with the memory that a kernel operation uses.
#[derive(Debug)]
pub struct WaitGuard(Arc<Count>);

impl WaitGroup {
    /// A count with nothing in flight.
    pub fn new() -> Self {
        Self::default()
    }

    /// Begins an operation.
    pub fn enter(&self) -> WaitGuard {
        self.0.in_flight.fetch_add(1, Ordering::Relaxed);
        WaitGuard(Arc::clone(&self.0))
    }

    /// Whether nothing is in flight. If so, the effects of the operations that ended are visible to
    /// the caller.
    pub fn is_empty(&self) -> bool {
        self.0.in_flight.load(Ordering::Acquire) == 0
    }

    /// Waits until nothing is in flight.
    pub async fn wait(&self) {
        self.0.drained.wait_until(|| self.is_empty().then_some(())).await;
    }

    /// The event to wait for before calling again; `None` when nothing is in flight. For a caller
    /// that checks under a lock.
    pub fn listen(&self) -> Option<EventListener> {
        if self.is_empty() {
            return None;
        }
        let drained = self.0.drained.listen();
        (!self.is_empty()).then_some(drained)
    }
}

impl Drop for WaitGuard {
    fn drop(&mut self) {
        if self.0.in_flight.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.drained.notify_all();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    #[test]
    fn a_waiter_waits_for_all_clones() {
        let group = WaitGroup::new();
        let mut context = Context::from_waker(Waker::noop());
        assert!(group.is_empty() && group.listen().is_none());
        let (one, other) = (group.enter(), group.clone().enter());
        let mut waiting = pin!(group.wait());
        assert!(waiting.as_mut().poll(&mut context).is_pending());
        drop(one);
        assert!(waiting.as_mut().poll(&mut context).is_pending());
        let mut listener = pin!(group.listen().expect("one is left"));
        assert!(listener.as_mut().poll(&mut context).is_pending());
        drop(other);
        assert!(waiting.as_mut().poll(&mut context).is_ready());
        assert!(listener.as_mut().poll(&mut context).is_ready() && group.is_empty());
    }
}

/// Every interleaving of operations and a waiter. Compiled in lab/models.
#[cfg(all(test, loom))]
mod loom_model {
    use std::sync::Arc;

    use loom::sync::atomic::{AtomicUsize, Ordering};
    use loom::thread;

    use super::WaitGroup;
    use crate::sync::loom_support::block_on;

    #[test]
    fn a_waiter_goes_on_after_the_last_operation_and_sees_what_all_did() {
        loom::model(|| {
            let (group, done) = (WaitGroup::new(), Arc::new(AtomicUsize::new(0)));
            let threads = [(); 2].map(|()| {
                let (guard, done) = (group.enter(), Arc::clone(&done));
                thread::spawn(move || {
                    done.fetch_add(1, Ordering::Relaxed);
                    drop(guard);
                })
            });
            block_on(group.wait());
            assert_eq!(done.load(Ordering::Relaxed), 2);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }
}
