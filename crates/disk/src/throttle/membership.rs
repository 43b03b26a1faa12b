//! The membership of a disk in a group, and the admission of the disk's requests by the group.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blockhouse_core::{Durability, Offload, Request};
use blockhouse_engine::current_party;
use parking_lot::RwLock;

use super::admission::Admission;
use super::buckets::{Cost, Direction};
use super::group::{Begin, ThrottleGroup};
use super::limits::RateLimits;
use super::queue::{Class, MemberKey, Outcome};

/// The waits of a disk's requests for their limits since the disk joined its group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ThrottleStats {
    /// Requests that wait now.
    pub waiting: u64,
    /// Requests that have waited, or wait now.
    pub delayed: u64,
    /// The total time that admitted requests have waited.
    pub delayed_time: Duration,
}

/// The cost of a request in the limits, and its class.
pub(crate) struct RequestCost {
    class: Class,
    cost: Cost,
}

impl RequestCost {
    /// The cost of a write of this many bytes that need not be durable.
    pub(crate) fn of_write(bytes: u64) -> Self {
        Self { class: Class::Write, cost: Cost { direction: Direction::Write, bytes } }
    }

    /// The cost of a request; `None` if no limits apply to it. `durability` is the minimum
    /// durability of the disk's writes, and `write_zeroes` the support of its storage for zero
    /// writes.
    pub(crate) fn of(
        request: &Request,
        durability: Durability,
        write_zeroes: Offload,
    ) -> Option<Self> {
        let write = |asked: Durability, bytes| {
            let class = match asked.max(durability) {
                Durability::None => Class::Write,
                Durability::Data | Durability::Full => Class::DurableWrite,
            };
            Some(Self { class, cost: Cost { direction: Direction::Write, bytes } })
        };
        let read = |bytes| {
            Some(Self { class: Class::Read, cost: Cost { direction: Direction::Read, bytes } })
        };
        match request {
            Request::Read { into, .. } => read(into.len() as u64),
            Request::Prefetch { range } => read(range.length()),
            Request::Write { from, durability, .. } => write(*durability, from.len() as u64),
            Request::WriteZeroes { range, durability, .. } => {
                let is_quick = write_zeroes == Offload::Available;
                write(*durability, if is_quick { 0 } else { range.length() })
            }
            Request::Discard { durability, .. } => write(*durability, 0),
            Request::Flush => None,
        }
    }
}

/// A disk in a group, until it is dropped.
struct Membership {
    group: Arc<ThrottleGroup>,
    key: MemberKey,
}

impl Membership {
    fn new(group: Arc<ThrottleGroup>) -> Self {
        let key = group.join();
        Self { group, key }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.group.leave(self.key);
    }
}

#[derive(Default)]
struct State {
    membership: Option<Membership>,
    /// The number of existing [`LiftGuard`]s.
    lifts: usize,
}

/// The limits of a disk: its membership in a group, which it shares with other disks or has alone.
#[derive(Default)]
pub struct Throttle {
    /// Whether requests need admission. While the limits change, either value is correct.
    is_active: AtomicBool,
    state: RwLock<State>,
}

impl Throttle {
    /// Whether requests need admission. One relaxed load.
    pub(crate) fn is_active(&self) -> bool {
        self.is_active.load(Ordering::Relaxed)
    }

    /// Admits a request, or returns the future to await before it may begin. One relaxed load if
    /// there are no limits.
    pub(crate) fn admit(
        &self,
        cost: impl FnOnce() -> Option<RequestCost>,
    ) -> Option<Pin<Box<dyn Future<Output = ()> + '_>>> {
        if !self.is_active() {
            return None;
        }
        let cost = cost()?;
        let admission = self.begin(&cost)?;
        Some(Box::pin(self.wait(cost, admission)))
    }

    /// Awaits the admission. If the disk moves to another group meanwhile, asks that group.
    async fn wait(&self, cost: RequestCost, first: Admission) {
        let mut admission = Some(first);
        while let Some(waiting) = admission {
            match waiting.await {
                Outcome::Admitted | Outcome::Lifted => return,
                Outcome::Moved => admission = self.begin(&cost),
            }
        }
    }

    fn begin(&self, cost: &RequestCost) -> Option<Admission> {
        let state = self.state.read();
        let Membership { group, key } = state.membership.as_ref()?;
        if group.is_unlimited() {
            return None;
        }
        match group.begin((*key, current_party()), (cost.class, cost.cost)) {
            Begin::Admitted => None,
            Begin::Waiting(ticket) => Some(Admission::new(group, ticket)),
        }
    }

    /// Makes the disk share the limits of a group, instead of the limits of its present group; with
    /// `None` the disk has no limits. Requests that wait for the former limits then wait for the
    /// new limits.
    pub fn set_group(&self, group: Option<Arc<ThrottleGroup>>) {
        let mut state = self.state.write();
        let membership = group.map(Membership::new);
        if let Some(Membership { group, key }) = &membership
            && state.lifts > 0
        {
            group.lift(*key);
        }
        let former = std::mem::replace(&mut state.membership, membership);
        self.update(&state);
        drop(state);
        // This drop wakes the waiting requests, which start over in the other group.
        drop(former);
    }

    /// The group whose limits the disk shares, if it has limits.
    pub fn group(&self) -> Option<Arc<ThrottleGroup>> {
        let state = self.state.read();
        state.membership.as_ref().map(|membership| Arc::clone(&membership.group))
    }

    /// Sets the disk's limits, also while requests are in flight or wait. If it shares the limits
    /// of a group, these are the new limits of the group. Otherwise the disk gets limits of its
    /// own; its requests must then be submitted on event loops.
    pub fn set_limits(&self, limits: RateLimits) {
        match self.group() {
            Some(group) => group.set_limits(limits),
            None => self.set_group(Some(ThrottleGroup::new(limits))),
        }
    }

    pub(crate) fn stats(&self) -> ThrottleStats {
        let state = self.state.read();
        let Some(Membership { group, key }) = &state.membership else {
            return ThrottleStats::default();
        };
        let counts = group.counts(*key);
        ThrottleStats {
            waiting: counts.waiting,
            delayed: counts.delayed,
            delayed_time: Duration::from_nanos(counts.delayed_time),
        }
    }

    /// Lifts the limits until the guard is dropped: all requests are admitted at once, and their
    /// cost does not count. For an orderly end, which waits for the requests in flight.
    pub fn lift(self: &Arc<Self>) -> LiftGuard {
        let mut state = self.state.write();
        state.lifts += 1;
        if let (1, Some(Membership { group, key })) = (state.lifts, &state.membership) {
            group.lift(*key);
        }
        self.update(&state);
        LiftGuard(Arc::clone(self))
    }

    fn restore(&self) {
        let mut state = self.state.write();
        state.lifts -= 1;
        if let (0, Some(Membership { group, key })) = (state.lifts, &state.membership) {
            group.restore(*key);
        }
        self.update(&state);
    }

    fn update(&self, state: &State) {
        let is_active = state.membership.is_some() && state.lifts == 0;
        self.is_active.store(is_active, Ordering::Relaxed);
    }
}

/// The limits of a disk are lifted until this is dropped.
#[must_use = "the limits are in force again when it is dropped"]
pub struct LiftGuard(Arc<Throttle>);

impl Drop for LiftGuard {
    fn drop(&mut self) {
        self.0.restore();
    }
}
