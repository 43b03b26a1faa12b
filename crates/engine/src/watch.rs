//! Waiting for events that others signal by an eventfd, such as a guest's kicks.
//!
//! Promise: an event after [`Watch::new`], or between two waits, ends the next wait. Events that come
//! together may count as one. The counter is never read, so that an event costs no system call of its
//! own and a blocking descriptor does no harm: the engine is told of each change.
//!
//! Whoever signals can be spared that while the loop is awake: with a [`Lookout`] the loop looks for
//! itself at every turn, and asks for signals only before it sleeps.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use crate::local::{self, Local};
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
    fn add(&self, source: Source, lookout: Rc<dyn Lookout>) -> (WatchKey, Rc<Events>) {
        self.issued.update(|issued| issued + 1);
        let (key, events) = (WatchKey(self.issued.get()), Rc::<Events>::default());
        let entry = Entry { key, source, events: Rc::clone(&events), lookout };
        self.list.borrow_mut().push(entry);
        (key, events)
    }

    fn remove(&self, key: WatchKey) {
        let mut list = self.list.borrow_mut();
        let entry = list.iter().position(|entry| entry.key == key).map(|at| list.swap_remove(at));
        // A look-out's drop may do anything.
        drop(list);
        drop(entry);
    }

    /// Passes an event on. One for a watch that is gone is forgotten.
    pub(crate) fn signal(&self, key: WatchKey) -> Option<Source> {
        let list = self.list.borrow();
        let entry = list.iter().find(|entry| entry.key == key)?;
        entry.events.happen();
        Some(entry.source)
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

/// An eventfd that this loop watches, until it is dropped.
pub struct Watch {
    local: Rc<Local>,
    key: WatchKey,
    events: Rc<Events>,
    descriptor: OwnedFd,
}

impl Watch {
    /// Watches an eventfd from the current thread's loop. If its counter is not zero, that counts as
    /// an event. `lookout` tells of events that it is not signalled for.
    ///
    /// # Errors
    /// `InvalidInput` when it is something else; or the kernel's.
    ///
    /// # Panics
    /// Outside of an event loop.
    pub fn new(descriptor: OwnedFd, lookout: Rc<dyn Lookout>) -> io::Result<Self> {
        if !is_eventfd(&descriptor) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "this is no eventfd"));
        }
        let local = local::current(Rc::clone);
        let source = Source::of_watch(descriptor.as_raw_fd());
        let (key, events) = local.watches.add(source, lookout);
        let watch = Self { local, key, events, descriptor };
        watch.local.watch(key, watch.descriptor.as_fd())?;
        Ok(watch)
    }

    /// Ready when there was an event since the last time that it was ready; otherwise the task is
    /// woken by the next one. For one task at a time.
    pub fn poll_event(&self, context: &mut Context<'_>) -> Poll<()> {
        if self.events.happened.take() {
            return Poll::Ready(());
        }
        let mut waiter = self.events.waiter.borrow_mut();
        match &mut *waiter {
            Some(waiter) => waiter.clone_from(context.waker()),
            None => *waiter = Some(context.waker().clone()),
        }
        Poll::Pending
    }

    /// Waits for an event.
    pub async fn event(&self) {
        poll_fn(|context| self.poll_event(context)).await;
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.local.watches.remove(self.key);
        self.local.unwatch(self.key, self.descriptor.as_fd());
    }
}

/// Whether a descriptor that somebody sent is an eventfd. Where that cannot be found out it is
/// believed.
pub fn is_eventfd(descriptor: impl AsFd) -> bool {
    let link = format!("/proc/self/fd/{}", descriptor.as_fd().as_raw_fd());
    match std::fs::read_link(link) {
        Ok(target) => target.as_os_str() == "anon_inode:[eventfd]",
        Err(_) => true,
    }
}
