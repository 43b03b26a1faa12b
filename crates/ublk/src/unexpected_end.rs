//! The unexpected end of a device: another process has removed it.
//!
//! Guarantee: it is reported once, however many queues end, and never after the server began to
//! stop the device.

use parking_lot::Mutex;

type Call = Box<dyn FnOnce() + Send>;

/// The callback for an unexpected end, if one is set.
#[derive(Default)]
pub(crate) struct UnexpectedEnd {
    call: Mutex<Option<Call>>,
}

impl UnexpectedEnd {
    /// Sets the callback.
    pub(crate) fn call(&self, call: impl FnOnce() + Send + 'static) {
        *self.call.lock() = Some(Box::new(call));
    }

    /// Removes the callback, because the server is about to stop the device.
    pub(crate) fn expect(&self) {
        self.call.lock().take();
    }

    /// Reports the end of a queue.
    pub(crate) fn queue_has_ended(&self) {
        // The callback is called without the lock.
        let call = self.call.lock().take();
        call.into_iter().for_each(|call| call());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    fn counted() -> (UnexpectedEnd, Arc<AtomicU32>) {
        let (end, calls) = (UnexpectedEnd::default(), Arc::<AtomicU32>::default());
        let counter = Arc::clone(&calls);
        end.call(move || {
            counter.fetch_add(1, Ordering::Relaxed);
        });
        (end, calls)
    }

    #[test]
    fn it_is_told_once_for_all_queues() {
        let (end, calls) = counted();
        for _ in 0..3 {
            end.queue_has_ended();
        }
        assert_eq!(calls.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn an_end_that_is_asked_for_is_not_told() {
        let (end, calls) = counted();
        end.expect();
        end.queue_has_ended();
        assert_eq!(calls.load(Ordering::Relaxed), 0);
        // Without a callback, the end of a queue is not reported.
        UnexpectedEnd::default().queue_has_ended();
    }
}
