//! Waiting until a predicate holds.

use super::parts::{Event, EventListener};

/// Lets tasks wait until a predicate holds that other tasks, on any thread, make true.
///
/// The predicate reads state that the caller keeps: an atomic, or data under a lock. A task that
/// changes the state calls [`notify_all`](Self::notify_all) afterwards. To notify costs one fence
/// and one load while no task waits.
#[derive(Debug)]
pub struct Condvar {
    changed: Event,
}

impl Condvar {
    /// A condition that no task waits for.
    pub fn new() -> Self {
        Self { changed: Event::new() }
    }

    /// Waits until `check` returns `Some`. `check` is called at once, and again after each
    /// notification.
    ///
    /// A change that precedes its notification is never missed, even between the check and the
    /// wait.
    pub async fn wait_until<T>(&self, mut check: impl FnMut() -> Option<T>) -> T {
        loop {
            if let Some(value) = check() {
                return value;
            }
            let changed = self.listen();
            // Check again, because a notification before `listen` did not reach this task.
            if let Some(value) = check() {
                return value;
            }
            changed.await;
        }
    }

    /// Resolves with the next [`notify_all`](Self::notify_all) after this call. For a caller that
    /// has to check its predicate under a lock of its own: listen under the lock, unlock, then
    /// wait.
    pub fn listen(&self) -> EventListener {
        self.changed.listen()
    }

    /// Makes all waiting tasks check again.
    pub fn notify_all(&self) {
        self.changed.notify(usize::MAX);
    }
}

impl Default for Condvar {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::cell::Cell;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    #[test]
    fn a_waiter_goes_on_when_its_predicate_holds_and_not_before() {
        let (condvar, value) = (Condvar::new(), Cell::new(0));
        let mut context = Context::from_waker(Waker::noop());
        let mut waiting = pin!(condvar.wait_until(|| (value.get() > 1).then(|| value.get())));
        assert!(waiting.as_mut().poll(&mut context).is_pending());
        value.set(1);
        condvar.notify_all();
        assert!(waiting.as_mut().poll(&mut context).is_pending(), "notified, but it does not hold");
        value.set(2);
        condvar.notify_all();
        assert_eq!(waiting.as_mut().poll(&mut context), Poll::Ready(2));
    }

    #[test]
    fn a_predicate_that_holds_needs_no_notification() {
        let condvar = Condvar::default();
        let mut waiting = pin!(condvar.wait_until(|| Some(7)));
        assert_eq!(waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(7));
    }
}
