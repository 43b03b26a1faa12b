//! The watches of a loop: for each eventfd, the waiting task and the poll source.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use crate::driver::adaptive_poll::EventSource;

/// A source of events that the loop polls, such as a ring in shared memory. The methods must not
/// create or drop watches, or run a loop.
pub trait PollSource {
    /// Whether an event is pending. The loop calls this in every iteration, so it must be fast.
    fn is_ready(&self) -> bool;

    /// Enables signals of the eventfd, because the loop is about to sleep. Returns whether an
    /// event is pending, checked after the signals are enabled.
    fn enable_notify(&self) -> bool;
}

/// The empty poll source, for an eventfd that is signalled at every event.
impl PollSource for () {
    fn is_ready(&self) -> bool {
        false
    }

    fn enable_notify(&self) -> bool {
        false
    }
}

/// The key of a watch of a loop, which no other watch of the loop has. The key of a watch that was
/// removed is given again after 2^32 others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WatchKey(pub(crate) u32);

/// The pending event of a watch, and the waker of its task.
#[derive(Default)]
pub(crate) struct Events {
    happened: Cell<bool>,
    waiter: RefCell<Option<Waker>>,
}

impl Events {
    /// Ready if an event occurred since the last poll. Otherwise the next event wakes the task.
    pub(crate) fn poll(&self, context: &mut Context<'_>) -> Poll<()> {
        if self.happened.take() {
            return Poll::Ready(());
        }
        let mut waiter = self.waiter.borrow_mut();
        match &mut *waiter {
            Some(waiter) => waiter.clone_from(context.waker()),
            None => *waiter = Some(context.waker().clone()),
        }
        Poll::Pending
    }

    fn signal(&self) {
        self.happened.set(true);
        let waiter = self.waiter.borrow();
        waiter.iter().for_each(Waker::wake_by_ref);
    }
}

/// The watches of a loop.
#[derive(Default)]
pub(crate) struct Watches {
    list: RefCell<Vec<WatchEntry>>,
    /// The last key that was given to a watch.
    issued: Cell<u32>,
}

struct WatchEntry {
    key: WatchKey,
    /// The index in the loop's estimates (`adaptive_poll`).
    event_source: EventSource,
    events: Rc<Events>,
    poll_source: Rc<dyn PollSource>,
}

impl Watches {
    pub(crate) fn add(
        &self,
        event_source: EventSource,
        poll_source: Rc<dyn PollSource>,
    ) -> (WatchKey, Rc<Events>) {
        let mut list = self.list.borrow_mut();
        let mut key = WatchKey(self.issued.get().wrapping_add(1));
        while list.iter().any(|entry| entry.key == key) {
            key.0 = key.0.wrapping_add(1);
        }
        self.issued.set(key.0);
        let events = Rc::<Events>::default();
        list.push(WatchEntry { key, event_source, events: Rc::clone(&events), poll_source });
        (key, events)
    }

    pub(crate) fn remove(&self, key: WatchKey) {
        let mut list = self.list.borrow_mut();
        let entry = list.iter().position(|entry| entry.key == key).map(|at| list.swap_remove(at));
        // The list is released first: the drop of a poll source may run any code.
        drop(list);
        drop(entry);
    }

    /// Passes an event to its watch, unless the watch was removed. Returns the event's source if
    /// the poll source is ready. `None` for `()`, and for an event that was polled before, because
    /// such an event does not predict the next one.
    pub(crate) fn signal(&self, key: WatchKey) -> Option<EventSource> {
        let list = self.list.borrow();
        let entry = list.iter().find(|entry| entry.key == key)?;
        entry.events.signal();
        entry.poll_source.is_ready().then_some(entry.event_source)
    }

    /// Polls all poll sources and signals the watches of ready ones. Returns the last of these.
    pub(crate) fn find_ready(&self) -> Option<EventSource> {
        self.signal_those(|source| source.is_ready())
    }

    /// Enables the eventfds' signals before the loop sleeps; else as
    /// [`find_ready`](Self::find_ready).
    pub(crate) fn enable_notify(&self) -> Option<EventSource> {
        self.signal_those(|source| source.enable_notify())
    }

    fn signal_those(&self, is_ready: impl Fn(&dyn PollSource) -> bool) -> Option<EventSource> {
        let mut found = None;
        for entry in &*self.list.borrow() {
            if is_ready(&*entry.poll_source) {
                entry.events.signal();
                found = Some(entry.event_source);
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_watch_gets_the_key_of_another_one() {
        let watches = Watches::default();
        let add = || watches.add(EventSource::MESSAGE, Rc::new(())).0;
        let first = add();
        for last in [u32::MAX, first.0 - 1] {
            watches.issued.set(last);
            assert_ne!(add(), first);
        }
    }
}
