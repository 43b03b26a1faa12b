//! Waiting for another task of the same thread.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// A place where one task waits until something that other tasks of its thread change is as it
/// wants it. Allocates nothing, and telling it costs nothing while nobody waits.
#[derive(Default)]
pub struct Condition {
    waiting: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl Condition {
    /// Waits until `check` gives something. It is asked at once, and again after each
    /// [`notify`](Self::notify).
    pub async fn until<T>(&self, mut check: impl FnMut() -> Option<T>) -> T {
        poll_fn(|context| {
            if let Some(value) = check() {
                self.waiting.set(false);
                return Poll::Ready(value);
            }
            self.waiting.set(true);
            let mut waker = self.waker.borrow_mut();
            match &mut *waker {
                Some(waker) => waker.clone_from(context.waker()),
                None => *waker = Some(context.waker().clone()),
            }
            Poll::Pending
        })
        .await
    }

    /// Has the waiting task look again, if there is one.
    pub fn notify(&self) {
        if self.waiting.replace(false)
            && let Some(waker) = &*self.waker.borrow()
        {
            waker.wake_by_ref();
        }
    }
}
