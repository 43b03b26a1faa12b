//! Waiting for events that others signal by an eventfd, such as a guest's kicks.
//!
//! Guarantee: an event after [`Watch::new`], or between two waits, ends the next wait. Events that
//! come together may be reported as one. The engine reports each change of the counter, so it is
//! never read: an event costs no further system call, and a blocking descriptor does no harm.
//!
//! With a [`PollSource`] the loop polls for events while it is awake, and enables signals only
//! before it sleeps. So a busy source need not signal at all.

use std::future::poll_fn;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::rc::Rc;
use std::task::{Context, Poll};

use crate::driver::adaptive_poll::EventSource;
use crate::driver::watches::{Events, PollSource, WatchKey};
use crate::event_loop::event_signal::is_eventfd;
use crate::event_loop::local::{self, Local};

/// An eventfd that this loop watches, until it is dropped.
pub struct Watch {
    local: Rc<Local>,
    key: WatchKey,
    events: Rc<Events>,
    descriptor: OwnedFd,
}

impl Watch {
    /// Watches an eventfd from the current thread's loop. A counter that is not zero is treated as
    /// an event. The loop polls `poll_source` for events that do not signal the eventfd.
    ///
    /// # Errors
    /// `InvalidInput` if the descriptor is not an eventfd; or the kernel's error.
    ///
    /// # Panics
    /// Outside of an event loop.
    pub fn new(descriptor: OwnedFd, poll_source: Rc<dyn PollSource>) -> io::Result<Self> {
        if !is_eventfd(&descriptor) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "this is no eventfd"));
        }
        let local = local::current(Rc::clone);
        let event_source = EventSource::of_watch(descriptor.as_raw_fd());
        let (key, events) = local.watches.add(event_source, poll_source);
        let watch = Self { local, key, events, descriptor };
        watch.local.watch(key, watch.descriptor.as_fd())?;
        Ok(watch)
    }

    /// Ready if there was an event since this was last ready; otherwise the next event wakes the
    /// task. For one task at a time.
    pub fn poll_event(&self, context: &mut Context<'_>) -> Poll<()> {
        self.events.poll(context)
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
