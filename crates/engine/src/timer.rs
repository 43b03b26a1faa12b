//! Timers of one loop.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::event_loop;

/// Who is to be woken when. The second part of the key keeps equal times apart.
#[derive(Default)]
pub(crate) struct Timers {
    queue: RefCell<BTreeMap<Key, Waker>>,
    numbers: Cell<u64>,
}

type Key = (Instant, u64);

impl Timers {
    /// When the next one is due.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.queue.borrow().first_key_value().map(|(&(due, _), _)| due)
    }

    /// Wakes all that are due.
    pub(crate) fn fire(&self) {
        if self.queue.borrow().is_empty() {
            return;
        }
        let later = self.queue.borrow_mut().split_off(&(Instant::now(), u64::MAX));
        let due = self.queue.replace(later);
        due.into_values().for_each(Waker::wake);
    }
}

/// Completes after a while. See [`sleep`].
pub struct Sleep {
    due: Instant,
    key: Option<Key>,
}

/// Waits for `duration`, or a little longer.
pub fn sleep(duration: Duration) -> Sleep {
    Sleep { due: Instant::now() + duration, key: None }
}

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        if this.due <= Instant::now() {
            return Poll::Ready(());
        }
        event_loop::current(|local| {
            let timers = &local.timers;
            let key = *this.key.get_or_insert_with(|| {
                timers.numbers.update(|number| number + 1);
                (this.due, timers.numbers.get())
            });
            timers.queue.borrow_mut().insert(key, cx.waker().clone());
        });
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            // Without a loop there is no queue to clean.
            event_loop::try_current(|local| local.timers.queue.borrow_mut().remove(&key));
        }
    }
}
