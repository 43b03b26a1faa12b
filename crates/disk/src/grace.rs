//! Waiting for what is in flight at a moment, but not for what starts later.

use std::sync::atomic::{AtomicUsize, Ordering};

use event_listener::Event;

/// Counts operations in two epochs, so that those of the old one come to an end although new ones
/// keep starting. One waiter at a time.
#[derive(Default)]
pub(crate) struct Grace {
    epoch: AtomicUsize,
    in_flight: [AtomicUsize; 2],
    drained: Event,
}

/// An operation in flight, until it is dropped.
pub(crate) struct Pass<'a> {
    grace: &'a Grace,
    epoch: usize,
}

impl Grace {
    /// Counts an operation in.
    pub(crate) fn enter(&self) -> Pass<'_> {
        loop {
            let epoch = self.epoch.load(Ordering::SeqCst);
            let pass = Pass { grace: self, epoch };
            self.in_flight[epoch].fetch_add(1, Ordering::SeqCst);
            // Had the epoch changed before the count was visible, its waiter could have missed us.
            if self.epoch.load(Ordering::SeqCst) == epoch {
                return pass;
            }
        }
    }

    /// Resolves when every operation that was in flight at the call has been dropped.
    pub(crate) async fn elapsed(&self) {
        let epoch = self.epoch.load(Ordering::SeqCst);
        // A waiter before this one may have given up: its epoch has to drain first.
        self.drain(1 - epoch).await;
        if self.in_flight[epoch].load(Ordering::SeqCst) > 0 {
            self.epoch.store(1 - epoch, Ordering::SeqCst);
            self.drain(epoch).await;
        }
    }

    async fn drain(&self, epoch: usize) {
        while self.in_flight[epoch].load(Ordering::SeqCst) > 0 {
            let drained = self.drained.listen();
            if self.in_flight[epoch].load(Ordering::SeqCst) > 0 {
                drained.await;
            }
        }
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        if self.grace.in_flight[self.epoch].fetch_sub(1, Ordering::SeqCst) == 1 {
            self.grace.drained.notify(usize::MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn poll(future: std::pin::Pin<&mut impl Future<Output = ()>>) -> Poll<()> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn only_what_was_in_flight_is_waited_for() {
        let grace = Grace::default();
        let earlier = grace.enter();
        let mut elapsed = pin!(grace.elapsed());
        assert!(poll(elapsed.as_mut()).is_pending());
        let _later = grace.enter();
        assert!(poll(elapsed.as_mut()).is_pending());
        drop(earlier);
        assert!(poll(elapsed.as_mut()).is_ready());
    }

    #[test]
    fn a_waiter_after_one_that_gave_up_waits_for_both_epochs() {
        let grace = Grace::default();
        let old = grace.enter();
        assert!(poll(pin!(grace.elapsed())).is_pending());
        let young = grace.enter();
        let mut elapsed = pin!(grace.elapsed());
        drop(young);
        assert!(poll(elapsed.as_mut()).is_pending());
        drop(old);
        assert!(poll(elapsed.as_mut()).is_ready());
    }

    #[test]
    fn nothing_in_flight_is_no_wait() {
        assert!(poll(pin!(Grace::default().elapsed())).is_ready());
    }
}
