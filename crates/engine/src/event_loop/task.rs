//! Tasks of one loop: futures of its thread, scheduled fairly between parties.
//!
//! Each task belongs to a party. A party is a future submitted through a
//! [`Handle`](crate::Handle), such as a client's connection or a guest's queue, with all tasks
//! that it spawns. A party is *deferred* if one of its tasks yields, or if many of its tasks are
//! ready at once. An iteration of the loop runs at most one deferred party, for
//! [`InFlightLimits::turn`]. Between two such turns the loop takes the kernel's completions and
//! runs the other parties. So deferred parties delay a party that mostly waits for I/O by at most
//! one turn, plus the poll at its end. At least every third iteration has a turn of a deferred
//! party.
//!
//! A party that is alone on its loop delays no other party. So the loop polls all of its ready
//! tasks before it calls the kernel, and one system call submits the operations of all. A time
//! limit bounds the delay of the first operations.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use blockhouse_core::InFlightLimits;
use blockhouse_core::metrics::{Timestamp, clock};

use crate::driver::loop_shared::{LoopShared, MAIN, Ready, TaskHeader};
use crate::driver::queued_flag::QueuedFlag;

struct TaskEntry {
    header: Arc<TaskHeader>,
    party: Rc<Party>,
    /// The task's future, taken out while it is polled.
    work: Option<Work>,
}

struct Work {
    future: Pin<Box<dyn Future<Output = ()>>>,
    waker: Waker,
}

/// Tasks that are deferred together.
#[derive(Default)]
struct Party {
    /// Whether the party is deferred.
    is_deferred: Cell<bool>,
    /// The ready tasks of the party while it is deferred.
    ready: RefCell<VecDeque<Arc<TaskHeader>>>,
    /// The last call of `run_ready` that polled the party (`iteration`), and its number of polls.
    polls: Cell<(u64, u32)>,
    /// The number of the party's tasks.
    tasks: Cell<usize>,
}

/// Polls of a party in one `run_ready` before the party is deferred.
const MAX_POLLS: u32 = 32;

/// Time limit of a party that is alone and continues beyond [`MAX_POLLS`]. Without the limit, the
/// operations of the first tasks would wait until all tasks were polled.
const MAX_TIME_ALONE: Duration = Duration::from_millis(1);

/// Maximum iterations in a row that run other parties and no deferred one.
const MAX_WAITS: u32 = 2;

/// Maximum operations that one poll of a task completes inline.
const BUDGET: u32 = 32;

/// The inline operations that the current poll has left. A task never waits for an operation that
/// completes inline, so without a bound many of them would starve the other tasks.
#[derive(Default)]
pub(crate) struct Budget(Cell<u32>);

impl Budget {
    pub(crate) fn renew(&self) {
        self.0.set(BUDGET);
    }

    pub(crate) fn spend(&self) {
        self.0.update(|left| left.saturating_sub(1));
    }

    pub(crate) fn is_spent(&self) -> bool {
        self.0.get() == 0
    }
}

/// All tasks of a loop.
pub(crate) struct Tasks {
    shared: Arc<LoopShared>,
    pub(crate) ready: Rc<Ready>,
    table: RefCell<slab::Slab<TaskEntry>>,
    /// The budget of the task that is polled.
    pub(crate) budget: Budget,
    /// The party of the task that is polled. Outside of tasks: the party of the tasks that the
    /// main future spawns.
    party: RefCell<Rc<Party>>,
    /// The deferred parties, the next one first.
    deferred: RefCell<VecDeque<Rc<Party>>>,
    /// Iterations that ran other parties since the last turn of a deferred one.
    waited: Cell<u32>,
    iteration: Cell<u64>,
    /// The number of parties with tasks.
    parties: Cell<usize>,
}

impl Tasks {
    /// The tasks of the loop with this `shared` part.
    pub(crate) fn new(shared: &Arc<LoopShared>) -> Self {
        Self {
            shared: Arc::clone(shared),
            ready: Ready::new(shared),
            table: RefCell::default(),
            budget: Budget::default(),
            party: RefCell::default(),
            deferred: RefCell::default(),
            waited: Cell::new(0),
            iteration: Cell::new(0),
            parties: Cell::new(0),
        }
    }

    /// Adds a future to the current party, as a ready task.
    pub(crate) fn add(&self, future: Pin<Box<dyn Future<Output = ()>>>) {
        let party = Rc::clone(&self.party.borrow());
        self.add_to(party, future);
    }

    /// As [`add`](Self::add), as a party of its own.
    pub(crate) fn add_party(&self, future: Pin<Box<dyn Future<Output = ()>>>) {
        self.add_to(Rc::default(), future);
    }

    fn add_to(&self, party: Rc<Party>, future: Pin<Box<dyn Future<Output = ()>>>) {
        let mut table = self.table.borrow_mut();
        let entry = table.vacant_entry();
        let header = TaskHeader::new(entry.key(), QueuedFlag::new(true), &self.shared);
        let waker = Waker::from(Arc::clone(&header));
        self.ready.push(Arc::clone(&header));
        self.count_task(&party);
        entry.insert(TaskEntry { header, party, work: Some(Work { future, waker }) });
    }

    /// The waker of the main future of `block_on`. Also marks this future as ready.
    pub(crate) fn main_waker(&self) -> Waker {
        self.ready.set_main();
        Waker::from(TaskHeader::new(MAIN, QueuedFlag::new(false), &self.shared))
    }

    /// The address of the current party, which is unique while the party exists.
    pub(crate) fn current_party(&self) -> usize {
        Rc::as_ptr(&self.party.borrow()).addr()
    }

    /// Polls every task that is ready now, except tasks of deferred parties. Tasks that become
    /// ready later wait for the next call, so that no task keeps the loop from its completions.
    pub(crate) fn run_ready(&self) {
        self.iteration.update(|number| number + 1);
        let count = self.ready.len();
        let start = (count >= MAX_POLLS as usize).then(clock::now);
        for _ in 0..count {
            let Some(header) = self.ready.pop() else { return };
            if let Some((party, work)) = self.take_work(&header) {
                self.poll(&header, &party, work);
                let count = party.count_poll(self.iteration.get());
                let is_enough = count.is_multiple_of(MAX_POLLS) && !self.may_go_on(start);
                // A task that was woken during its poll counts as yielding.
                if header.queued.is_set() || is_enough {
                    self.defer(party);
                }
            }
        }
    }

    /// Runs the next deferred party for a turn. If other parties are ready, the turn waits for
    /// them up to [`MAX_WAITS`] times in a row.
    pub(crate) fn run_deferred(&self) {
        if self.deferred.borrow().is_empty() {
            return;
        }
        self.sort_ready();
        if !self.ready.is_empty() && self.waited.get() < MAX_WAITS {
            self.waited.update(|count| count + 1);
            return;
        }
        self.waited.set(0);
        let next = self.deferred.borrow_mut().pop_front();
        let Some(party) = next else { return };
        // The clock is not read again if the task has read it. Then the task's work after its
        // reading counts as part of the next poll.
        let mut now = clock::now();
        let (end, end_alone) = (now + InFlightLimits::DEFAULT.turn, now + MAX_TIME_ALONE);
        let mut has_yielded = false;
        while let Some(header) = self.next_of(&party) {
            if let Some(work) = self.take_deferred_work(&header) {
                self.poll(&header, &party, work);
                has_yielded |= header.queued.is_set();
            }
            now = clock::later_than(now);
            let goes_on = self.is_alone() && !has_yielded && now < end_alone;
            if now >= end && !goes_on {
                self.deferred.borrow_mut().push_back(party);
                return;
            }
        }
        party.is_deferred.set(false);
    }

    /// Whether there is nothing to poll.
    pub(crate) fn is_idle(&self) -> bool {
        self.ready.is_empty() && self.deferred.borrow().is_empty()
    }

    /// The next ready task of a deferred party.
    fn next_of(&self, party: &Party) -> Option<Arc<TaskHeader>> {
        let next = party.ready.borrow_mut().pop_front();
        if next.is_some() {
            return next;
        }
        self.sort_ready();
        party.ready.borrow_mut().pop_front()
    }

    /// Moves ready tasks of deferred parties to their party.
    fn sort_ready(&self) {
        let table = self.table.borrow();
        self.ready.retain(|header| {
            let entry = table.get(header.index);
            match entry
                .filter(|entry| Arc::ptr_eq(&entry.header, header) && entry.party.is_deferred.get())
            {
                Some(entry) => {
                    entry.party.ready.borrow_mut().push_back(Arc::clone(header));
                    false
                }
                None => true,
            }
        });
    }

    /// Whether the party is alone, and [`MAX_TIME_ALONE`] has not passed since `start`.
    fn may_go_on(&self, start: Option<Timestamp>) -> bool {
        let goes_on = |start| clock::later_than(start) < start + MAX_TIME_ALONE;
        self.is_alone() && start.is_some_and(goes_on)
    }

    /// Whether one party has all tasks.
    fn is_alone(&self) -> bool {
        self.parties.get() == 1
    }

    fn count_task(&self, party: &Party) {
        if party.tasks.replace(party.tasks.get() + 1) == 0 {
            self.parties.update(|count| count + 1);
        }
    }

    fn discount_task(&self, party: &Party) {
        party.tasks.update(|count| count - 1);
        if party.tasks.get() == 0 {
            self.parties.update(|count| count - 1);
        }
    }

    fn defer(&self, party: Rc<Party>) {
        if !party.is_deferred.replace(true) {
            self.deferred.borrow_mut().push_back(party);
        }
    }

    fn poll(&self, header: &Arc<TaskHeader>, party: &Rc<Party>, mut work: Work) {
        self.budget.renew();
        let outside = self.party.replace(Rc::clone(party));
        let poll = work.future.as_mut().poll(&mut Context::from_waker(&work.waker));
        let mut table = self.table.borrow_mut();
        if poll.is_pending() {
            table[header.index].work = Some(work);
        } else {
            table.remove(header.index);
            self.discount_task(party);
            // The table is released first: the drop of a future may spawn tasks.
            drop(table);
            drop(work);
        }
        self.party.replace(outside);
    }

    /// Takes the task's future for a poll. A task of a deferred party is queued there instead.
    fn take_work(&self, header: &Arc<TaskHeader>) -> Option<(Rc<Party>, Work)> {
        let mut table = self.table.borrow_mut();
        // A late wake-up finds its slot empty, or occupied by a later task.
        let entry = table.get_mut(header.index).filter(|entry| Arc::ptr_eq(&entry.header, header));
        match entry {
            Some(entry) if entry.party.is_deferred.get() => {
                entry.party.ready.borrow_mut().push_back(Arc::clone(header));
                None
            }
            Some(entry) => {
                // The flag is cleared before the poll, so that a wake-up during the poll queues
                // the task again.
                header.queued.clear();
                Some((Rc::clone(&entry.party), entry.work.take()?))
            }
            None => {
                header.queued.clear();
                None
            }
        }
    }

    /// As [`take_work`](Self::take_work), in the turn of the task's party.
    fn take_deferred_work(&self, header: &Arc<TaskHeader>) -> Option<Work> {
        let mut table = self.table.borrow_mut();
        header.queued.clear();
        let entry = table.get_mut(header.index).filter(|entry| Arc::ptr_eq(&entry.header, header));
        entry.and_then(|entry| entry.work.take())
    }

    /// Drops all tasks, including tasks that these drops spawn, and clears all ready queues.
    pub(crate) fn clear(&self) {
        while !self.table.borrow().is_empty() {
            let table = self.table.take();
            table.iter().for_each(|(_, entry)| self.discount_task(&entry.party));
            drop(table);
        }
        self.ready.clear();
        for party in self.deferred.take() {
            party.is_deferred.set(false);
            party.ready.take();
        }
    }
}

impl Party {
    /// Counts a poll. Returns the number of the party's polls in this call of `run_ready`.
    fn count_poll(&self, iteration: u64) -> u32 {
        let (last, polls) = self.polls.get();
        let polls = if last == iteration { polls + 1 } else { 1 };
        self.polls.set((iteration, polls));
        polls
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The polls in one `run_ready` of a party with `count` tasks, alone or beside another party.
    fn polled_at_once(count: usize, is_alone: bool) -> usize {
        let shared = LoopShared::new().expect("a loop");
        let tasks = Rc::new(Tasks::new(&shared));
        let polled = Rc::new(Cell::new(0));
        if !is_alone {
            tasks.add_party(Box::pin(std::future::pending()));
        }
        let (party, count_poll) = (Rc::downgrade(&tasks), Rc::clone(&polled));
        tasks.add_party(Box::pin(async move {
            for _ in 0..count {
                let polled = Rc::clone(&count_poll);
                let task = async move {
                    polled.update(|count| count + 1);
                    std::future::pending().await
                };
                party.upgrade().expect("it polls").add(Box::pin(task));
            }
        }));
        tasks.run_ready();
        tasks.run_ready();
        let polled = polled.get();
        tasks.clear();
        assert_eq!(tasks.parties.get(), 0, "nothing is left");
        polled
    }

    #[test]
    fn a_party_lets_others_go_first() {
        assert_eq!(polled_at_once(100, false), MAX_POLLS as usize);
    }

    #[test]
    fn a_party_that_is_alone_goes_on() {
        // A busy machine may sometimes take longer than the limit.
        assert!((0..10_000).any(|_| polled_at_once(100, true) == 100));
    }
}
