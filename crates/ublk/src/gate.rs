//! The gate that holds requests back while another process takes a device over.
//!
//! Guarantee: once [`Gate::shut`] has returned, no request is being carried out, and none begins
//! until [`Gate::open`]. Waiting requests still belong to the driver: if this process ends
//! meanwhile, the driver issues them again.

use std::sync::atomic::{AtomicBool, Ordering, fence};

use blockhouse_core::sync::{Condvar, WaitGroup, WaitGuard};

/// The gate of one queue.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    is_shut: AtomicBool,
    in_flight: WaitGroup,
    opened: Condvar,
}

impl Gate {
    /// Waits until the gate is open. A request is in flight until the guard is dropped.
    pub(crate) async fn enter(&self) -> WaitGuard {
        loop {
            let guard = self.in_flight.enter();
            // Pairs with the fence of `shut`: either this sees that the gate is shut, or `shut`
            // sees the request.
            fence(Ordering::SeqCst);
            if !self.is_shut.load(Ordering::Acquire) {
                return guard;
            }
            drop(guard);
            let is_open = || (!self.is_shut.load(Ordering::Acquire)).then_some(());
            self.opened.wait_until(is_open).await;
        }
    }

    /// Prevents requests from beginning, and waits for the requests in flight.
    pub(crate) async fn shut(&self) {
        self.close();
        self.in_flight.wait().await;
    }

    /// Prevents further requests from beginning.
    pub(crate) fn close(&self) {
        self.is_shut.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// Lets requests begin again.
    pub(crate) fn open(&self) {
        self.is_shut.store(false, Ordering::Release);
        self.opened.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    #[test]
    fn a_shut_gate_has_nothing_in_flight_and_lets_nothing_begin() {
        let gate = Gate::default();
        let mut context = Context::from_waker(Waker::noop());
        let Poll::Ready(first) = pin!(gate.enter()).poll(&mut context) else {
            panic!("it is open")
        };
        let mut shut = pin!(gate.shut());
        assert!(shut.as_mut().poll(&mut context).is_pending());
        let mut second = pin!(gate.enter());
        assert!(second.as_mut().poll(&mut context).is_pending());
        drop(first);
        assert!(shut.as_mut().poll(&mut context).is_ready());
        assert!(second.as_mut().poll(&mut context).is_pending());
        gate.open();
        assert!(second.as_mut().poll(&mut context).is_ready());
    }
}
