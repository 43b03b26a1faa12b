//! How a queue detects new requests while its loop sleeps: by the guest's kicks, or, if the
//! front-end has no eventfd for them (`VHOST_USER_SET_VRING_KICK` with bit 8) or the host cannot
//! watch it, by polling the ring at intervals.
//!
//! A loop that is awake polls a watched ring in each iteration, also if the guest does not kick.

use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use blockhouse_engine::{PollSource, Sleep, Watch, sleep};
use rustix::event::{EventfdFlags, eventfd};

/// A polled ring is read at the minimum interval while requests arrive. Each time that it is empty
/// the interval doubles, up to the maximum.
const MIN_INTERVAL: Duration = Duration::from_micros(50);
const MAX_INTERVAL: Duration = Duration::from_millis(1);

/// How a guest announces new requests.
#[derive(Debug)]
pub enum Kick {
    /// The guest signals an eventfd.
    Event(OwnedFd),
    /// The guest does not kick, so the ring is polled.
    Polled,
}

impl Kick {
    /// A duplicate with its own descriptor.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Event(event) => Self::Event(event.try_clone()?),
            Self::Polled => Self::Polled,
        })
    }
}

/// The descriptors that wake a sleeping loop for a ring.
pub struct Kicks {
    /// The guest's eventfd. For a polled ring, an eventfd that is never signalled, because the loop
    /// polls only rings that are watched.
    watch: Option<Watch>,
    timer: Option<Timer>,
}

/// The time when a polled ring is read next.
struct Timer {
    interval: Duration,
    sleep: Pin<Box<Sleep>>,
}

impl Kicks {
    /// Watches the ring of `disk` in the way that the front-end requested. The descriptor is an
    /// eventfd; other descriptors were refused when the front-end sent them. A ring that cannot be
    /// watched (a limit of epoll) is polled.
    pub fn new(ring: Rc<dyn PollSource>, kick: Kick, disk: &str) -> Self {
        let is_polled = matches!(kick, Kick::Polled);
        let descriptor = match kick {
            Kick::Event(descriptor) => Ok(descriptor),
            Kick::Polled => eventfd(0, EventfdFlags::CLOEXEC).map_err(io::Error::from),
        };
        let watch = descriptor.and_then(|descriptor| Watch::new(descriptor, ring));
        let watch = watch.inspect_err(|error| {
            tracing::warn!(disk, "a queue is polled, which is slower: cannot watch it: {error}");
        });
        let timer = (is_polled || watch.is_err()).then(Timer::new);
        Self { watch: watch.ok(), timer }
    }

    /// Whether the ring may have new entries. If not, the task is woken when there may be some.
    pub fn poll(&mut self, context: &mut Context<'_>, has_available: impl Fn() -> bool) -> bool {
        let mut is_kicked = false;
        while self.watch.as_ref().is_some_and(|watch| watch.poll_event(context).is_ready()) {
            is_kicked = true;
        }
        let is_due = self.timer.as_mut().is_some_and(|timer| timer.poll(context, has_available));
        is_kicked || is_due
    }
}

impl Timer {
    fn new() -> Self {
        Self { interval: MIN_INTERVAL, sleep: Box::pin(sleep(MIN_INTERVAL)) }
    }

    fn poll(&mut self, context: &mut Context<'_>, has_available: impl Fn() -> bool) -> bool {
        let mut found = false;
        while self.sleep.as_mut().poll(context) == Poll::Ready(()) {
            found |= has_available();
            self.interval =
                if found { MIN_INTERVAL } else { (2 * self.interval).min(MAX_INTERVAL) };
            self.sleep = Box::pin(sleep(self.interval));
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use blockhouse_engine::{EngineChoice, EventLoop, timeout};

    use super::*;

    #[test]
    fn a_ring_that_cannot_be_watched_is_polled() {
        EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
            let kick = Kick::Event(tempfile::tempfile().unwrap().into());
            let mut kicks = Kicks::new(Rc::new(()), kick, "disk");
            let found = poll_fn(|context| match kicks.poll(context, || true) {
                true => Poll::Ready(()),
                false => Poll::Pending,
            });
            assert_eq!(timeout(Duration::from_secs(30), found).await, Some(()));
        });
    }
}
