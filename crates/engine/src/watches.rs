//! The watches of a loop: who waits for which signal, and where to look without one.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use crate::poll::Source;

/// Where a loop finds out by itself that there is something to do. Neither method may make or drop
/// watches, or run a loop.
pub trait Lookout {
    /// Whether there is. Asked at every turn, so it has to be quick.
    fn look(&self) -> bool;

    /// The loop is about to sleep: has the eventfd signalled from now on. Says whether there was
    /// something to do already, seen after that took effect.
    fn arm(&self) -> bool;
}

/// For an eventfd that is signalled at every event.
impl Lookout for () {
    fn look(&self) -> bool {
        false
    }

    fn arm(&self) -> bool {
        false
    }
}

/// Names a watch of a loop; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WatchKey(pub(crate) u32);

/// What happened to the descriptor of a watch.
#[derive(Default)]
pub(crate) struct Events {
    happened: Cell<bool>,
    waiter: RefCell<Option<Waker>>,
}

impl Events {
    /// Ready when something happened since the last time; otherwise the task is woken by the next event.
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

    fn happen(&self) {
        self.happened.set(true);
        let waiter = self.waiter.borrow();
        waiter.iter().for_each(Waker::wake_by_ref);
    }
}

/// The watches of a loop.
#[derive(Default)]
pub(crate) struct Watches {
    list: RefCell<Vec<Entry>>,
    issued: Cell<u32>,
}

struct Entry {
    key: WatchKey,
    source: Source,
    events: Rc<Events>,
    lookout: Rc<dyn Lookout>,
}

impl Watches {
    pub(crate) fn add(&self, source: Source, lookout: Rc<dyn Lookout>) -> (WatchKey, Rc<Events>) {
        self.issued.update(|issued| issued + 1);
        let (key, events) = (WatchKey(self.issued.get()), Rc::<Events>::default());
        let entry = Entry { key, source, events: Rc::clone(&events), lookout };
        self.list.borrow_mut().push(entry);
        (key, events)
    }

    pub(crate) fn remove(&self, key: WatchKey) {
        let mut list = self.list.borrow_mut();
        let entry = list.iter().position(|entry| entry.key == key).map(|at| list.swap_remove(at));
        // A look-out's drop may do anything.
        drop(list);
        drop(entry);
    }

    /// Passes an event on. One for a watch that is gone is forgotten. Gives its source, unless it is of
    /// something that the loop saw before: then it says nothing of what comes next.
    pub(crate) fn signal(&self, key: WatchKey) -> Option<Source> {
        let list = self.list.borrow();
        let entry = list.iter().find(|entry| entry.key == key)?;
        entry.events.happen();
        entry.lookout.look().then_some(entry.source)
    }

    /// Looks for events. Gives the source of one of them.
    pub(crate) fn look(&self) -> Option<Source> {
        self.find(|lookout| lookout.look())
    }

    /// Asks for signals, as the loop is about to sleep. Gives the source of an event that is there.
    pub(crate) fn arm(&self) -> Option<Source> {
        self.find(|lookout| lookout.arm())
    }

    fn find(&self, is_there: impl Fn(&dyn Lookout) -> bool) -> Option<Source> {
        let mut found = None;
        for entry in &*self.list.borrow() {
            if is_there(&*entry.lookout) {
                entry.events.happen();
                found = Some(entry.source);
            }
        }
        found
    }
}
