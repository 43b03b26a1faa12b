//! Waiting for another task of the same thread.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// Lets one task wait until a condition holds that other tasks of its thread change. Allocates nothing;
/// [`notify`](Self::notify) costs a load and a store while no task waits.
#[derive(Default)]
pub struct Condvar {
    is_waiting: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl Condvar {
    /// Waits until `check` returns a value. It is called at once, and again after each
    /// [`notify`](Self::notify).
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

    /// Has the waiting task check again, if a task waits.
    pub fn notify(&self) {
        if self.is_waiting.replace(false)
            && let Some(waker) = &*self.waker.borrow()
        {
            waker.wake_by_ref();
        }
    }
}
