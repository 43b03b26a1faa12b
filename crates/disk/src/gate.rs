//! The gate that changes of the disk pass: shut while the image is changed as a whole.
//!
//! Who passes pays for two atomic additions. The one who shuts it waits until all who are inside have
//! left; those who come later wait until it opens.

use std::sync::atomic::{AtomicUsize, Ordering};

use async_lock::{Semaphore, SemaphoreGuard};
use blockhouse_core::sync::Condvar;

/// The bit that says "shut"; below it, how many are inside.
const SHUT: usize = 1 << (usize::BITS - 1);

/// See the module's page.
pub(crate) struct Gate {
    state: AtomicUsize,
    opened: Condvar,
    emptied: Condvar,
    /// Of one: the mutex of the same crate looks at the clock.
    one_at_a_time: Semaphore,
}

impl Default for Gate {
    fn default() -> Self {
        Self {
            state: AtomicUsize::new(0),
            opened: Condvar::new(),
            emptied: Condvar::new(),
            one_at_a_time: Semaphore::new(1),
        }
    }
}

/// Being inside.
pub(crate) struct Pass<'a>(&'a Gate);

/// The gate is shut and nobody inside.
pub(crate) struct Alone<'a> {
    gate: &'a Gate,
    _turn: SemaphoreGuard<'a>,
}

impl Gate {
    /// Goes in.
    pub(crate) async fn enter(&self) -> Pass<'_> {
        self.opened.wait_until(|| self.try_enter()).await
    }

    fn try_enter(&self) -> Option<Pass<'_>> {
        if self.state.fetch_add(1, Ordering::SeqCst) & SHUT == 0 {
            return Some(Pass(self));
        }
        self.leave();
        None
    }

    fn leave(&self) {
        if self.state.fetch_sub(1, Ordering::SeqCst) == SHUT + 1 {
            self.emptied.notify_all();
        }
    }

    /// Shuts the gate and waits until nobody is inside.
    pub(crate) async fn shut(&self) -> Alone<'_> {
        let turn = self.one_at_a_time.acquire().await;
        let alone = Alone { gate: self, _turn: turn };
        self.state.fetch_or(SHUT, Ordering::SeqCst);
        let is_empty = || (self.state.load(Ordering::SeqCst) == SHUT).then_some(());
        self.emptied.wait_until(is_empty).await;
        alone
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.gate.state.fetch_and(!SHUT, Ordering::SeqCst);
        self.gate.opened.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn poll<F: Future>(future: &mut std::pin::Pin<&mut F>) -> Option<F::Output> {
        match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn who_shuts_waits_for_those_inside_and_keeps_others_out() {
        let gate = Gate::default();
        let first = poll(&mut pin!(gate.enter())).expect("it is open");
        let mut shutting = pin!(gate.shut());
        assert!(poll(&mut shutting).is_none(), "somebody is inside");
        let mut later = pin!(gate.enter());
        assert!(poll(&mut later).is_none(), "it is shut");
        drop(first);
        let alone = poll(&mut shutting).expect("nobody is inside");
        assert!(poll(&mut later).is_none());
        drop(alone);
        assert!(poll(&mut later).is_some());
    }

    #[test]
    fn who_gives_up_shutting_lets_the_others_in() {
        let gate = Gate::default();
        let _inside = poll(&mut pin!(gate.enter())).expect("it is open");
        {
            let mut given_up = pin!(gate.shut());
            assert!(poll(&mut given_up).is_none());
        }
        assert!(poll(&mut pin!(gate.enter())).is_some());
    }
}
