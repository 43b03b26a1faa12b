//! Virtual time, and the events that are due.
//!
//! Time stands still while tasks run and jumps from event to event. Events of the same moment
//! happen in an order chosen by the seed.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use fastrand::Rng;
use parking_lot::Mutex;

type Action = Box<dyn FnOnce() + Send>;

/// The clock of one simulation. Clones are the same clock.
#[derive(Clone)]
pub struct Clock(Arc<Mutex<Timeline>>);

struct Timeline {
    now: Duration,
    events: BinaryHeap<Reverse<Event>>,
    random: Rng,
    scheduled: u64,
}

struct Event {
    at: Duration,
    /// Orders events of the same moment: a random number, then the event's number, which is unique.
    order: (u64, u64),
    action: Action,
}

impl Clock {
    pub(crate) fn new(random: Rng) -> Self {
        let events = BinaryHeap::new();
        Self(Arc::new(Mutex::new(Timeline { now: Duration::ZERO, events, random, scheduled: 0 })))
    }

    /// Time since the simulation began.
    pub fn now(&self) -> Duration {
        self.0.lock().now
    }

    /// Runs `action` after `delay`, whether or not a task waits for it.
    pub fn schedule(&self, delay: Duration, action: impl FnOnce() + Send + 'static) {
        let mut timeline = self.0.lock();
        timeline.scheduled += 1;
        let at = timeline.now + delay;
        let order = (timeline.random.u64(..), timeline.scheduled);
        timeline.events.push(Reverse(Event { at, order, action: Box::new(action) }));
    }

    /// Resolves after `delay`.
    pub async fn sleep(&self, delay: Duration) {
        let alarm = Oneshot::new();
        let sender = alarm.clone();
        self.schedule(delay, move || sender.set(()));
        alarm.wait().await;
    }

    /// Advances the time to the next event and removes the event.
    pub(crate) fn advance(&self) -> Option<Action> {
        let mut timeline = self.0.lock();
        let Reverse(event) = timeline.events.pop()?;
        timeline.now = timeline.now.max(event.at);
        Some(event.action)
    }
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.order) == (other.at, other.order)
    }
}

impl Eq for Event {}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Event {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// A value that is set once, and that one task waits for.
pub(crate) struct Oneshot<T>(Arc<Mutex<(Option<T>, Option<Waker>)>>);

impl<T> Clone for Oneshot<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Oneshot<T> {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Mutex::new((None, None))))
    }

    pub(crate) fn set(&self, value: T) {
        let waker = {
            let mut state = self.0.lock();
            state.0 = Some(value);
            state.1.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    pub(crate) fn take(&self) -> Option<T> {
        self.0.lock().0.take()
    }

    pub(crate) async fn wait(&self) -> T {
        poll_fn(|context| {
            let mut state = self.0.lock();
            match state.0.take() {
                Some(value) => Poll::Ready(value),
                None => {
                    state.1 = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }
}
