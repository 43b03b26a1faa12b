//! A group of disks with common limits. One lock protects its state, and is held for a few steps at
//! a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;
use std::time::Duration;

use blockhouse_engine::{Clock, LoopClock};
use parking_lot::Mutex;

use super::bucket::Nanos;
use super::buckets::Cost;
use super::limits::RateLimits;
use super::queue::{Class, MemberKey, PartyKey, Poll, Queue, Ticket, WaitCounts, Wakers};

/// Disks that share limits, as a throttle group of QEMU: see
/// [`Throttle::set_group`](crate::Throttle::set_group). Any event loops may serve these disks.
pub struct ThrottleGroup {
    is_unlimited: AtomicBool,
    queue: Mutex<Queue>,
    clock: Arc<dyn Clock + Send + Sync>,
}

/// The result of beginning a request.
pub(super) enum Begin {
    Admitted,
    Waiting(Ticket),
}

impl ThrottleGroup {
    /// A group without disks. Requests of its disks are submitted on event loops.
    pub fn new(limits: RateLimits) -> Arc<Self> {
        Self::with_clock(limits, Arc::new(LoopClock::new()))
    }

    /// As [`new`](Self::new), with another clock, for other executors.
    pub fn with_clock(limits: RateLimits, clock: Arc<dyn Clock + Send + Sync>) -> Arc<Self> {
        Arc::new(Self {
            is_unlimited: AtomicBool::new(limits.is_unlimited()),
            queue: Mutex::new(Queue::new(limits, now(&*clock))),
            clock,
        })
    }

    /// The limits that apply.
    pub fn limits(&self) -> RateLimits {
        self.queue.lock().limits()
    }

    /// Applies other limits, also to waiting requests. A limit keeps its credit or debt, as far as
    /// the new limit allows. A new limit starts without credit, except for bursts.
    pub fn set_limits(&self, limits: RateLimits) {
        self.change(|queue, now, wakers| queue.set_limits(limits, now, wakers));
        self.is_unlimited.store(limits.is_unlimited(), Ordering::Relaxed);
        self.dispatch();
    }

    /// Whether requests need no admission.
    pub(super) fn is_unlimited(&self) -> bool {
        self.is_unlimited.load(Ordering::Relaxed)
    }

    pub(super) fn now(&self) -> Nanos {
        now(&*self.clock)
    }

    pub(super) fn clock(&self) -> &dyn Clock {
        &*self.clock
    }

    pub(super) fn join(&self) -> MemberKey {
        self.queue.lock().join()
    }

    pub(super) fn leave(&self, member: MemberKey) {
        self.change(|queue, _, wakers| queue.leave(member, wakers));
    }

    pub(super) fn lift(&self, member: MemberKey) {
        self.change(|queue, _, wakers| queue.lift(member, wakers));
    }

    pub(super) fn restore(&self, member: MemberKey) {
        self.queue.lock().restore(member);
    }

    pub(super) fn counts(&self, member: MemberKey) -> WaitCounts {
        self.queue.lock().counts(member)
    }

    /// Begins a request: admits it, or queues it.
    pub(super) fn begin(
        &self,
        (member, party): (MemberKey, PartyKey),
        (class, cost): (Class, Cost),
    ) -> Begin {
        let now = self.now();
        let mut queue = self.queue.lock();
        if queue.try_admit(member, cost, now) {
            Begin::Admitted
        } else {
            Begin::Waiting(queue.enqueue((member, party), (class, cost), now))
        }
    }

    /// The state of a waiting request. First admits all requests that the limits allow now.
    pub(super) fn poll(&self, ticket: Ticket, waker: &Waker) -> Poll {
        loop {
            let (is_more, poll) = self.change(|queue, now, wakers| {
                let is_more = queue.dispatch(now, wakers);
                (is_more, queue.poll(ticket, waker, now))
            });
            if !is_more || matches!(poll, Poll::Done(_)) {
                return poll;
            }
        }
    }

    /// Cancels a waiting request whose future is dropped.
    pub(super) fn cancel(&self, ticket: Ticket) {
        self.change(|queue, now, wakers| queue.cancel(ticket, now, wakers));
    }

    fn dispatch(&self) {
        while self.change(|queue, now, wakers| queue.dispatch(now, wakers)) {}
    }

    /// Changes the queue, and wakes the affected tasks after the lock is released.
    fn change<R>(&self, change: impl FnOnce(&mut Queue, Nanos, &mut Wakers) -> R) -> R {
        let now = self.now();
        let mut wakers = Wakers::new();
        let result = change(&mut self.queue.lock(), now, &mut wakers);
        wakers.into_iter().for_each(Waker::wake);
        result
    }
}

fn now(clock: &dyn Clock) -> Nanos {
    u64::try_from(clock.now().as_nanos()).unwrap_or(u64::MAX)
}

/// The time from `now` to `until`.
pub(super) fn time_until(until: Nanos, now: Nanos) -> Duration {
    Duration::from_nanos(until.saturating_sub(now))
}
