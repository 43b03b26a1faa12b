//! How a queue learns of new requests while its loop would sleep: by the guest's kicks, or by looking at
//! the ring from time to time where the front-end has none (`VHOST_USER_SET_VRING_KICK` with bit 8).
//!
//! In both cases a loop that is awake looks at the ring at every turn.

use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use blockhouse_core::Storage;
use blockhouse_engine::{Lookout, Sleep, Watch, sleep};
use rustix::event::{EventfdFlags, eventfd};

use super::Queue;

/// A polled ring is looked at this often while requests come, and half as often after each look in vain,
/// down to once a millisecond.
const MIN_INTERVAL: Duration = Duration::from_micros(50);
const MAX_INTERVAL: Duration = Duration::from_millis(1);

/// How a guest tells of new requests.
#[derive(Debug)]
pub enum Kick {
    /// It signals an eventfd.
    Event(OwnedFd),
    /// It does not: the ring is looked at again and again.
    Polled,
}

impl Kick {
    /// Another handle of the same.
    ///
    /// # Errors
    /// The kernel's.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Event(event) => Self::Event(event.try_clone()?),
            Self::Polled => Self::Polled,
        })
    }
}

/// What ends a sleep of the loop over the ring.
pub struct Kicks {
    /// The guest's eventfd; for a polled ring one that is never signalled, so that the loop knows of the
    /// ring.
    watch: Option<Watch>,
    timer: Option<Timer>,
}

/// When a polled ring is looked at next.
struct Timer {
    interval: Duration,
    sleep: Pin<Box<Sleep>>,
}

impl Kicks {
    /// Watches the ring in the way that the front-end wants. A descriptor that cannot be watched was
    /// refused before.
    pub fn new<S: Storage>(queue: &Rc<Queue<S>>, kick: Kick) -> Self {
        let (descriptor, timer) = match kick {
            Kick::Event(descriptor) => (Some(descriptor), None),
            Kick::Polled => (eventfd(0, EventfdFlags::CLOEXEC).ok(), Some(Timer::new())),
        };
        queue.is_polled.set(timer.is_some());
        let lookout = Rc::clone(queue) as Rc<dyn Lookout>;
        let watch = descriptor.and_then(|descriptor| Watch::new(descriptor, lookout).ok());
        Self { watch, timer }
    }

    /// Whether the ring is to be looked at. Otherwise the task is woken when it is.
    pub fn poll(&mut self, context: &mut Context<'_>, has_news: impl Fn() -> bool) -> bool {
        let mut is_kicked = false;
        while self.watch.as_ref().is_some_and(|watch| watch.poll_event(context).is_ready()) {
            is_kicked = true;
        }
        let is_due = self.timer.as_mut().is_some_and(|timer| timer.poll(context, has_news));
        is_kicked || is_due
    }
}

impl Timer {
    fn new() -> Self {
        Self { interval: MIN_INTERVAL, sleep: Box::pin(sleep(MIN_INTERVAL)) }
    }

    fn poll(&mut self, context: &mut Context<'_>, has_news: impl Fn() -> bool) -> bool {
        let mut found = false;
        while self.sleep.as_mut().poll(context) == Poll::Ready(()) {
            found |= has_news();
            self.interval = match found {
                true => MIN_INTERVAL,
                false => (2 * self.interval).min(MAX_INTERVAL),
            };
            self.sleep = Box::pin(sleep(self.interval));
        }
        found
    }
}
