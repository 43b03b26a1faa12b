//! Waiting until a predicate holds, on one thread.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// Lets one task wait until a predicate holds that other tasks of its thread make true.
///
/// As [`Condvar`](super::Condvar) without atomic operations: `notify` costs one read of a flag
/// while no task waits, and waiting allocates nothing.
#[derive(Debug, Default)]
pub struct LocalCondvar {
    is_waiting: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl LocalCondvar {
    /// Waits until `check` returns `Some`. `check` is called at once, and again after each
    /// [`notify`](Self::notify). For one task at a time: if several wait, only the last is woken.
    pub async fn wait_until<T>(&self, mut check: impl FnMut() -> Option<T>) -> T {
        poll_fn(|context| {
            if let Some(value) = check() {
                self.is_waiting.set(false);
                return Poll::Ready(value);
            }
            self.is_waiting.set(true);
            let mut waker = self.waker.borrow_mut();
            match &mut *waker {
                Some(waker) => waker.clone_from(context.waker()),
                None => *waker = Some(context.waker().clone()),
            }
            Poll::Pending
        })
        .await
    }

    /// Makes the waiting task check again, if there is one.
    pub fn notify(&self) {
        if self.is_waiting.replace(false)
            && let Some(waker) = &*self.waker.borrow()
        {
            waker.wake_by_ref();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Wake};

    use super::*;

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_waiter_is_woken_once_a_wait() {
        let (condvar, value, wakes) =
            (LocalCondvar::default(), Cell::new(0), Arc::<Wakes>::default());
        let waker = Waker::from(Arc::clone(&wakes));
        let mut context = Context::from_waker(&waker);
        condvar.notify();
        let mut waiting = pin!(condvar.wait_until(|| (value.get() > 1).then(|| value.get())));
        assert!(waiting.as_mut().poll(&mut context).is_pending());
        condvar.notify();
        condvar.notify();
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
        assert!(waiting.as_mut().poll(&mut context).is_pending(), "it does not hold yet");
        value.set(2);
        condvar.notify();
        assert_eq!(wakes.0.load(Ordering::Relaxed), 2);
        assert_eq!(waiting.as_mut().poll(&mut context), Poll::Ready(2));
        condvar.notify();
        assert_eq!(wakes.0.load(Ordering::Relaxed), 2, "no task waits");
    }
}
