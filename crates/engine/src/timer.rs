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
        let now = Instant::now();
        while let Some(waker) = self.take_due(now) {
            waker.wake();
        }
    }

    fn take_due(&self, now: Instant) -> Option<Waker> {
        let mut queue = self.queue.borrow_mut();
        let first = queue.first_entry()?;
        (first.key().0 <= now).then(|| first.remove())
    }
}

/// Completes after a while. See [`sleep`].
pub struct Sleep {
    due: Instant,
    key: Option<Key>,
}

/// No sleep is longer: about thirty years.
const LONGEST: Duration = Duration::from_secs(1 << 30);

/// Waits for `duration`, or a little longer: engines without io_uring count in milliseconds. More
/// than thirty years are thirty years.
pub fn sleep(duration: Duration) -> Sleep {
    Sleep { due: Instant::now() + duration.min(LONGEST), key: None }
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
            let replaced = timers.queue.borrow_mut().insert(key, cx.waker().clone());
            drop(replaced);
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
