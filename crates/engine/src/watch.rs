//! Waiting for events that others signal by an eventfd, such as a guest's kicks.
//!
//! Promise: an event after [`Watch::new`], or between two waits, ends the next wait. Events that come
//! together may count as one. The counter is never read, so that an event costs no system call of its
//! own and a blocking descriptor does no harm: the engine is told of each change.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use crate::local::{self, Local};

/// Names a watch of a loop; never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct WatchKey(pub(crate) u32);

/// What happened to the descriptor of a watch.
#[derive(Default)]
pub(crate) struct Events {
    happened: Cell<bool>,
    waiter: RefCell<Option<Waker>>,
}

/// The watches of a loop.
#[derive(Default)]
pub(crate) struct Watches {
    list: RefCell<Vec<(WatchKey, Rc<Events>)>>,
    issued: Cell<u32>,
}

impl Watches {
    fn add(&self) -> (WatchKey, Rc<Events>) {
        self.issued.update(|issued| issued + 1);
        let (key, events) = (WatchKey(self.issued.get()), Rc::<Events>::default());
        self.list.borrow_mut().push((key, Rc::clone(&events)));
        (key, events)
    }

    fn remove(&self, key: WatchKey) {
        self.list.borrow_mut().retain(|(other, _)| *other != key);
    }

    /// Passes an event on. One for a watch that is gone is forgotten.
    pub(crate) fn signal(&self, key: WatchKey) {
        let waiter = {
            let list = self.list.borrow();
            let Some((_, events)) = list.iter().find(|(other, _)| *other == key) else { return };
            events.happened.set(true);
            events.waiter.borrow().clone()
        };
        waiter.into_iter().for_each(Waker::wake);
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
    /// an event.
    ///
    /// # Errors
    /// `InvalidInput` when it is something else; or the kernel's.
    ///
    /// # Panics
    /// Outside of an event loop.
    pub fn new(descriptor: OwnedFd) -> io::Result<Self> {
        if !is_eventfd(&descriptor) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "this is no eventfd"));
        }
        let local = local::current(Rc::clone);
        let (key, events) = local.watches.add();
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
