//! The waiting requests of a group, by disk (*member*) and by party. All of this data is protected
//! by the group's lock.
//!
//! Invariant: on each event loop where waiting requests have been polled, one request is the
//! *timekeeper*. Either it was polled as the timekeeper, or its waker was returned to the caller,
//! which calls the waker. Another request becomes the timekeeper if, at its poll, the next
//! admission is due more than a [`QUANTUM`] earlier than the timekeeper expects.
//!
//! One loop *leads*: its timekeeper has a timer for the moment when the next request may be
//! admitted. The timers of the other timekeepers expire [`BACKUP_DELAY`] later. So if the leading
//! loop is delayed, another loop admits the request, and leads from then on.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::task::Waker;
use std::thread::{self, ThreadId};

use slab::Slab;

use super::bucket::Nanos;
use super::buckets::{Buckets, Cost, Direction};
use super::fair_queue::FairQueue;
use super::limits::RateLimits;

/// Maximum number of requests that are admitted while the lock is held once.
const MAX_BATCH: usize = 64;

/// Minimum interval of timers. Requests that become ready within one interval are admitted
/// together. The delay costs no throughput, because a bucket saves the tokens of a longer time.
pub(super) const QUANTUM: Nanos = 250_000;

/// Delay of the leading loop's timekeeper after which another loop leads.
const BACKUP_DELAY: Nanos = 5_000_000;

/// A disk of a group.
pub(super) type MemberKey = usize;
/// A client's connection or a guest's queue.
pub(super) type PartyKey = usize;
/// The number of a waiting request. Later requests have greater tickets.
pub(super) type Ticket = u64;

/// Class of a request. The two classes of writes of a party take turns; `FairQueue` chooses between
/// reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    DurableWrite,
    Write,
    Read,
}

/// How the wait of a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The request is admitted, and the buckets count its cost.
    Admitted,
    /// The request is admitted, because the limits of its disk were lifted.
    Lifted,
    /// The disk of the request has left the group.
    Moved,
}

struct Waiter {
    member: MemberKey,
    party: PartyKey,
    /// The thread of the event loop that polls the request.
    event_loop: ThreadId,
    class: Class,
    cost: Cost,
    since: Nanos,
    outcome: Option<Outcome>,
    waker: Option<Waker>,
}

/// The waiting requests of a party, each class in order of arrival.
#[derive(Default)]
struct Party {
    classes: [VecDeque<Ticket>; 3],
    /// Whether the last admitted write was durable.
    was_durable: bool,
}

impl Party {
    /// The class of the next request of this direction to be admitted.
    fn next_class(&self, direction: Direction) -> Option<Class> {
        let turns: &[Class] = match direction {
            Direction::Read => &[Class::Read],
            Direction::Write if self.was_durable => &[Class::Write, Class::DurableWrite],
            Direction::Write => &[Class::DurableWrite, Class::Write],
        };
        turns.iter().copied().find(|class| !self.classes[*class as usize].is_empty())
    }

    fn is_empty(&self) -> bool {
        self.classes.iter().all(VecDeque::is_empty)
    }
}

/// The counts of a disk's waiting and delayed requests.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WaitCounts {
    pub(super) waiting: u64,
    pub(super) delayed: u64,
    pub(super) delayed_time: Nanos,
}

struct Member {
    parties: HashMap<PartyKey, Party>,
    order: FairQueue<PartyKey>,
    is_lifted: bool,
    counts: WaitCounts,
}

/// See the module's page.
pub(super) struct Queue {
    buckets: Buckets,
    members: Slab<Member>,
    order: FairQueue<MemberKey>,
    waiters: BTreeMap<Ticket, Waiter>,
    last_ticket: Ticket,
    /// The event loops where requests wait.
    loops: HashMap<ThreadId, WaitingLoop>,
    /// The leading loop; `None` if its requests have ended, until a timekeeper of another loop is
    /// polled.
    leading: Option<ThreadId>,
}

/// An event loop where requests wait.
#[derive(Default)]
struct WaitingLoop {
    tickets: BTreeSet<Ticket>,
    /// `None` until a request of this loop is polled.
    timekeeper: Option<Timekeeper>,
}

/// The request whose task has a timer.
#[derive(Clone, Copy)]
struct Timekeeper {
    ticket: Ticket,
    /// Time at which the next request may be admitted, computed at the last poll of this timekeeper
    /// or of its predecessor.
    until: Nanos,
}

/// Tasks to be woken once the lock is released.
pub(super) type Wakers = Vec<Waker>;

/// The next step of a waiting request.
pub(super) enum Poll {
    Done(Outcome),
    /// The request waits to be woken. A timekeeper waits until this time at the latest.
    Wait {
        until: Option<Nanos>,
    },
}

impl Queue {
    pub(super) fn new(limits: RateLimits, now: Nanos) -> Self {
        Self {
            buckets: Buckets::new(limits, now),
            members: Slab::new(),
            order: FairQueue::new(),
            waiters: BTreeMap::new(),
            last_ticket: 0,
            loops: HashMap::new(),
            leading: None,
        }
    }

    pub(super) fn limits(&self) -> RateLimits {
        self.buckets.limits()
    }

    /// Sets new limits, also for waiting requests. Wakes the timekeepers, because the time of the
    /// next admission may have changed.
    pub(super) fn set_limits(&mut self, limits: RateLimits, now: Nanos, wakers: &mut Wakers) {
        self.buckets.set_limits(limits, now);
        self.wake_timekeepers(wakers);
    }

    pub(super) fn join(&mut self) -> MemberKey {
        self.members.insert(Member {
            parties: HashMap::new(),
            order: FairQueue::new(),
            is_lifted: false,
            counts: WaitCounts::default(),
        })
    }

    /// Removes a member. Its waiting requests are woken with [`Outcome::Moved`].
    pub(super) fn leave(&mut self, key: MemberKey, wakers: &mut Wakers) {
        self.end_all(key, Outcome::Moved, wakers);
        self.order.remove(key);
        self.members.remove(key);
    }

    /// Admits the member's waiting requests, and from now on each later request without a wait.
    pub(super) fn lift(&mut self, key: MemberKey, wakers: &mut Wakers) {
        self.members[key].is_lifted = true;
        self.end_all(key, Outcome::Lifted, wakers);
    }

    /// Makes requests of the member wait again.
    pub(super) fn restore(&mut self, key: MemberKey) {
        self.members[key].is_lifted = false;
    }

    pub(super) fn counts(&self, key: MemberKey) -> WaitCounts {
        self.members[key].counts
    }

    /// Admits a request, unless it has to wait. Returns whether it is admitted.
    pub(super) fn try_admit(&mut self, key: MemberKey, cost: Cost, now: Nanos) -> bool {
        if self.members[key].is_lifted || !self.buckets.charge(cost) {
            return true;
        }
        // Waiting requests that may be admitted now have precedence.
        let is_behind = |direction: Direction| {
            self.order.has(direction) && self.buckets.ready_at(direction) <= now
        };
        let waits = Direction::BOTH.into_iter().any(is_behind)
            || self.order.has(cost.direction)
            || self.buckets.ready_at(cost.direction) > now;
        if !waits {
            self.buckets.take(cost, now);
        }
        !waits
    }

    /// Queues a request. Returns its ticket.
    pub(super) fn enqueue(
        &mut self,
        (member, party): (MemberKey, PartyKey),
        (class, cost): (Class, Cost),
        since: Nanos,
    ) -> Ticket {
        self.last_ticket += 1;
        let ticket = self.last_ticket;
        let event_loop = thread::current().id();
        let waiter =
            Waiter { member, party, event_loop, class, cost, since, outcome: None, waker: None };
        self.waiters.insert(ticket, waiter);
        self.loops.entry(event_loop).or_default().tickets.insert(ticket);
        self.order.enter(member, cost.direction);
        let member = &mut self.members[member];
        member.counts.waiting += 1;
        member.counts.delayed += 1;
        member.order.enter(party, cost.direction);
        let party = member.parties.entry(party).or_default();
        party.classes[class as usize].push_back(ticket);
        ticket
    }

    /// Admits requests that are ready. Returns `true` if more may be ready: after [`MAX_BATCH`]
    /// requests, the lock has been held long enough.
    pub(super) fn dispatch(&mut self, now: Nanos, wakers: &mut Wakers) -> bool {
        for _ in 0..MAX_BATCH {
            let is_ready = |direction: &Direction| {
                self.order.has(*direction) && self.buckets.ready_at(*direction) <= now
            };
            let ready = Direction::BOTH.map(|direction| is_ready(&direction).then_some(direction));
            match ready {
                [Some(_), Some(_)] => self.grant_next(&Direction::BOTH, now, wakers),
                [Some(one), None] | [None, Some(one)] => self.grant_next(&[one], now, wakers),
                [None, None] => return false,
            };
        }
        true
    }

    /// Admits the next request of these directions; `None` if no such request waits.
    fn grant_next(
        &mut self,
        directions: &[Direction],
        now: Nanos,
        wakers: &mut Wakers,
    ) -> Option<()> {
        let (key, direction) = self.order.first(directions)?;
        let member = &mut self.members[key];
        let (party_key, _) = member.order.first(&[direction])?;
        let party = member.parties.get_mut(&party_key)?;
        let class = party.next_class(direction)?;
        let ticket = *party.classes[class as usize].front()?;
        if direction == Direction::Write {
            party.was_durable = class == Class::DurableWrite;
        }
        let waiter = &self.waiters[&ticket];
        let (cost, time) = (waiter.cost, now.saturating_sub(waiter.since));
        let share = self.buckets.share(cost);
        member.order.advance(party_key, cost.direction, share);
        member.counts.delayed_time += time;
        self.order.advance(key, cost.direction, share);
        self.buckets.take(cost, now);
        self.end(ticket, Outcome::Admitted, wakers);
        Some(())
    }

    /// Ends the wait of a request.
    fn end(&mut self, ticket: Ticket, outcome: Outcome, wakers: &mut Wakers) {
        self.unlink(ticket, wakers);
        if let Some(waiter) = self.waiters.get_mut(&ticket) {
            waiter.outcome = Some(outcome);
            wakers.extend(waiter.waker.take());
        }
    }

    fn end_all(&mut self, key: MemberKey, outcome: Outcome, wakers: &mut Wakers) {
        let is_of = |waiter: &Waiter| waiter.member == key && waiter.outcome.is_none();
        let tickets: Vec<_> = self
            .waiters
            .iter()
            .filter(|(_, waiter)| is_of(waiter))
            .map(|(&ticket, _)| ticket)
            .collect();
        tickets.into_iter().for_each(|ticket| self.end(ticket, outcome, wakers));
    }

    /// Removes a waiting request from the queues.
    fn unlink(&mut self, ticket: Ticket, wakers: &mut Wakers) {
        let Waiter { member: key, party: party_key, event_loop, class, cost, .. } =
            self.waiters[&ticket];
        let member = &mut self.members[key];
        if let Some(party) = member.parties.get_mut(&party_key) {
            let tickets = &mut party.classes[class as usize];
            if let Ok(index) = tickets.binary_search(&ticket) {
                tickets.remove(index);
            }
            if party.is_empty() {
                member.parties.remove(&party_key);
            }
        }
        member.counts.waiting -= 1;
        member.order.leave(party_key, cost.direction);
        self.order.leave(key, cost.direction);
        self.leave_loop(ticket, event_loop, wakers);
    }

    /// Removes a request from its loop. If the request was the timekeeper, the loop's newest
    /// request becomes the timekeeper, because it is probably admitted last. If the request was the
    /// last one of the leading loop, the timekeeper of another loop is woken, and its loop leads.
    fn leave_loop(&mut self, ticket: Ticket, event_loop: ThreadId, wakers: &mut Wakers) {
        let Some(own) = self.loops.get_mut(&event_loop) else { return };
        own.tickets.remove(&ticket);
        let next = own.tickets.last().copied();
        if next.is_none() {
            self.loops.remove(&event_loop);
            if self.leading == Some(event_loop) {
                self.leading = None;
                let other = self.loops.values().find_map(|other| other.timekeeper);
                self.wake(other.map(|timekeeper| timekeeper.ticket), wakers);
            }
        } else if let Some(timekeeper) = own.timekeeper.filter(|former| former.ticket == ticket) {
            own.timekeeper = next.map(|ticket| Timekeeper { ticket, ..timekeeper });
            self.wake(next, wakers);
        }
    }

    fn wake_timekeepers(&mut self, wakers: &mut Wakers) {
        let timekeepers = self.loops.values().filter_map(|one| one.timekeeper);
        let tickets: Vec<_> = timekeepers.map(|timekeeper| timekeeper.ticket).collect();
        tickets.into_iter().for_each(|ticket| self.wake(Some(ticket), wakers));
    }

    /// Wakes the task of a waiting request.
    fn wake(&mut self, ticket: Option<Ticket>, wakers: &mut Wakers) {
        let waiter = ticket.and_then(|ticket| self.waiters.get_mut(&ticket));
        wakers.extend(waiter.and_then(|waiter| waiter.waker.take()));
    }

    /// The state of a request whose task is polled with `waker`. The outcome is returned once.
    pub(super) fn poll(&mut self, ticket: Ticket, waker: &Waker, now: Nanos) -> Poll {
        // The outcome was returned already: the request may continue.
        let Some(waiter) = self.waiters.get_mut(&ticket) else {
            return Poll::Done(Outcome::Admitted);
        };
        if let Some(outcome) = waiter.outcome {
            self.waiters.remove(&ticket);
            return Poll::Done(outcome);
        }
        match &mut waiter.waker {
            Some(former) => former.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
        let event_loop = waiter.event_loop;
        Poll::Wait { until: self.keep_time(ticket, event_loop, now) }
    }

    /// The expiry of a waiting request's timer; `None` if it is not the timekeeper of its loop.
    fn keep_time(&mut self, ticket: Ticket, event_loop: ThreadId, now: Nanos) -> Option<Nanos> {
        let until = self.next_ready_at();
        let is_earlier = |other: Timekeeper| until.saturating_add(QUANTUM) < other.until;
        let own = &mut self.loops.get_mut(&event_loop)?.timekeeper;
        if own.is_some_and(|own| own.ticket != ticket && !is_earlier(own)) {
            return None;
        }
        *own = Some(Timekeeper { ticket, until });
        let leading = self.leading.filter(|leading| *leading != event_loop);
        let leader = leading.and_then(|leading| self.loops.get(&leading)?.timekeeper);
        let is_late = |leader: Timekeeper| leader.until.saturating_add(BACKUP_DELAY) <= now;
        if leader.is_some_and(|leader| !is_earlier(leader) && !is_late(leader)) {
            return Some(until.saturating_add(BACKUP_DELAY));
        }
        self.leading = Some(event_loop);
        Some(until)
    }

    /// The time at which the next request may be admitted.
    fn next_ready_at(&self) -> Nanos {
        let waiting = Direction::BOTH.into_iter().filter(|direction| self.order.has(*direction));
        waiting.map(|direction| self.buckets.ready_at(direction)).min().unwrap_or(Nanos::MAX)
    }

    /// Removes a request whose future was dropped before its outcome was returned. Refunds the cost
    /// of a request that was admitted.
    pub(super) fn cancel(&mut self, ticket: Ticket, now: Nanos, wakers: &mut Wakers) {
        let Some(waiter) = self.waiters.get(&ticket) else { return };
        let cost = waiter.cost;
        match waiter.outcome {
            None => self.unlink(ticket, wakers),
            Some(Outcome::Admitted) => self.buckets.put_back(cost),
            Some(Outcome::Lifted | Outcome::Moved) => {}
        }
        self.waiters.remove(&ticket);
        // After a refund, other requests may be admitted now, or earlier than before.
        self.dispatch(now, wakers);
        self.wake_timekeepers(wakers);
    }
}
