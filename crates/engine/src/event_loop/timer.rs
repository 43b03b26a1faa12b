//! Timers of one loop.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::task::Waker;

use blockhouse_core::metrics::{Timestamp, clock};

/// The tasks to wake, by time. The second part of the key keeps equal times apart.
#[derive(Default)]
pub(crate) struct Timers {
    queue: RefCell<BTreeMap<Key, Waker>>,
    numbers: Cell<u64>,
}

/// A timer that was set.
pub(crate) type Key = (Timestamp, u64);

impl Timers {
    /// The time at which the next timer is due.
    pub(crate) fn next(&self) -> Option<Timestamp> {
        self.queue.borrow().first_key_value().map(|(&(due, _), _)| due)
    }

    /// Wakes all tasks whose timers are due.
    pub(crate) fn fire(&self) {
        if self.queue.borrow().is_empty() {
            return;
        }
        let now = clock::now();
        while let Some(waker) = self.take_due(now) {
            waker.wake();
        }
    }

    fn take_due(&self, now: Timestamp) -> Option<Waker> {
        let mut queue = self.queue.borrow_mut();
        let first = queue.first_entry()?;
        (first.key().0 <= now).then(|| first.remove())
    }

    /// Sets the timer to call the waker at `due`, for a new timer (no key yet) or one set before.
    pub(crate) fn set(&self, due: Timestamp, key: &mut Option<Key>, waker: &Waker) {
        let key = *key.get_or_insert_with(|| {
            self.numbers.update(|number| number + 1);
            (due, self.numbers.get())
        });
        let replaced = self.queue.borrow_mut().insert(key, waker.clone());
        // Dropped outside of the borrow, because a waker's drop may run any code.
        drop(replaced);
    }

    /// Forgets a timer.
    pub(crate) fn remove(&self, key: Key) {
        let removed = self.queue.borrow_mut().remove(&key);
        drop(removed);
    }
}
