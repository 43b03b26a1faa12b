//! Tasks of one loop: futures that stay on their thread, in fair turns.
//!
//! Tasks belong to parties: what was submitted through a [`Handle`](crate::Handle), a client's
//! connection or a guest's queue, is one, with all that it spawns. A party that computes for long
//! (a task of it yields, or many of its tasks are ready at once) goes behind the others: its tasks run
//! in turns of [`InFlightLimits::turn`], one party a turn, and between two turns the others run, with
//! what the kernel has for them. So a party that waits for I/O, and computes little, waits for one such
//! turn at most, whatever the others do; and one that is behind gets at least every third turn of the loop.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Instant;

use blockhouse_core::InFlightLimits;

use crate::queued::Queued;
use crate::remote::{Header, MAIN, Ready, Remote};

struct Entry {
    header: Arc<Header>,
    party: Rc<Party>,
    /// Taken out while it is polled.
    work: Option<Work>,
}

struct Work {
    future: Pin<Box<dyn Future<Output = ()>>>,
    waker: Waker,
}

/// Tasks that share turns.
#[derive(Default)]
struct Party {
    /// Whether it is behind the others.
    is_behind: Cell<bool>,
    /// While it is: its tasks that are ready.
    ready: RefCell<VecDeque<Arc<Header>>>,
    /// How many of its tasks were polled in the round with that number.
    polls: Cell<(u64, u32)>,
}

/// How many tasks of a party are polled in a round before it goes behind the others.
const POLLS: u32 = 32;

/// How often in a row parties that are behind let the others go first.
const PATIENCE: u32 = 2;

/// How many operations a task may do in one poll without waiting for any.
const BUDGET: u32 = 32;

/// What is left of it in the poll under way. An operation that is over on the spot never makes its
/// task wait; without a bound a task that does many of them would keep all others from running.
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
    remote: Arc<Remote>,
    pub(crate) ready: Rc<Ready>,
    table: RefCell<slab::Slab<Entry>>,
    /// Of the task that is polled.
    pub(crate) budget: Budget,
    /// That of the task that is polled; outside of all tasks, one for whatever is spawned there.
    party: RefCell<Rc<Party>>,
    /// The parties that are behind, the next one first.
    behind: RefCell<VecDeque<Rc<Party>>>,
    /// How often they let others go first since the last turn of theirs.
    waited: Cell<u32>,
    round: Cell<u64>,
}

impl Tasks {
    /// The tasks of the loop that is reached by `remote`.
    pub(crate) fn new(remote: &Arc<Remote>) -> Self {
        Self {
            remote: Arc::clone(remote),
            ready: Ready::new(remote),
            table: RefCell::default(),
            budget: Budget::default(),
            party: RefCell::default(),
            behind: RefCell::default(),
            waited: Cell::new(0),
            round: Cell::new(0),
        }
    }

    /// Takes a future in, ready to be polled, of the party that spawns it.
    pub(crate) fn add(&self, future: Pin<Box<dyn Future<Output = ()>>>) {
        let party = Rc::clone(&self.party.borrow());
        self.add_to(party, future);
    }

    /// As [`add`](Self::add), of a party of its own.
    pub(crate) fn add_party(&self, future: Pin<Box<dyn Future<Output = ()>>>) {
        self.add_to(Rc::default(), future);
    }

    fn add_to(&self, party: Rc<Party>, future: Pin<Box<dyn Future<Output = ()>>>) {
        let mut table = self.table.borrow_mut();
        let place = table.vacant_entry();
        let header = Header::new(place.key(), Queued::new(true), &self.remote);
        let waker = Waker::from(Arc::clone(&header));
        self.ready.push(Arc::clone(&header));
        place.insert(Entry { header, party, work: Some(Work { future, waker }) });
    }

    /// The waker of the future that `block_on` runs, which is to be polled at once.
    pub(crate) fn main_waker(&self) -> Waker {
        self.ready.set_main();
        Waker::from(Header::new(MAIN, Queued::new(false), &self.remote))
    }

    /// Polls every task that is ready now, but those of parties that are behind; those that become
    /// ready meanwhile wait for the next round, so that no task keeps the loop from its completions.
    pub(crate) fn run_ready(&self) {
        self.round.update(|round| round + 1);
        for _ in 0..self.ready.len() {
            let Some(header) = self.ready.pop() else { return };
            if let Some((party, work)) = self.take_work(&header) {
                self.poll(&header, &party, work);
                let count = party.count_poll(self.round.get());
                // One that is ready again has yielded.
                if header.queued.is_set() || count >= POLLS {
                    self.put_behind(party);
                }
            }
        }
    }

    /// Gives the next one of the parties that are behind its turn, unless others are ready and have
    /// not been let go first often enough.
    pub(crate) fn run_behind(&self) {
        if self.behind.borrow().is_empty() {
            return;
        }
        self.sort_ready();
        if !self.ready.is_empty() && self.waited.get() < PATIENCE {
            self.waited.update(|count| count + 1);
            return;
        }
        self.waited.set(0);
        let next = self.behind.borrow_mut().pop_front();
        let Some(party) = next else { return };
        let end = Instant::now() + InFlightLimits::DEFAULT.turn;
        while let Some(header) = self.next_of(&party) {
            if let Some(work) = self.take_work_behind(&header) {
                self.poll(&header, &party, work);
            }
            if Instant::now() >= end {
                self.behind.borrow_mut().push_back(party);
                return;
            }
        }
        party.is_behind.set(false);
    }

    /// Whether there is nothing to poll.
    pub(crate) fn is_idle(&self) -> bool {
        self.ready.is_empty() && self.behind.borrow().is_empty()
    }

    /// The next ready task of a party that is behind.
    fn next_of(&self, party: &Party) -> Option<Arc<Header>> {
        let next = party.ready.borrow_mut().pop_front();
        if next.is_some() {
            return next;
        }
        self.sort_ready();
        party.ready.borrow_mut().pop_front()
    }

    /// Moves ready tasks of parties that are behind out of the others' way.
    fn sort_ready(&self) {
        let table = self.table.borrow();
        self.ready.retain(|header| {
            let entry = table.get(header.index);
            match entry
                .filter(|entry| Arc::ptr_eq(&entry.header, header) && entry.party.is_behind.get())
            {
                Some(entry) => {
                    entry.party.ready.borrow_mut().push_back(Arc::clone(header));
                    false
                }
                None => true,
            }
        });
    }

    fn put_behind(&self, party: Rc<Party>) {
        if !party.is_behind.replace(true) {
            self.behind.borrow_mut().push_back(party);
        }
    }

    fn poll(&self, header: &Arc<Header>, party: &Rc<Party>, mut work: Work) {
        self.budget.renew();
        let outside = self.party.replace(Rc::clone(party));
        let poll = work.future.as_mut().poll(&mut Context::from_waker(&work.waker));
        let mut table = self.table.borrow_mut();
        if poll.is_pending() {
            table[header.index].work = Some(work);
        } else {
            table.remove(header.index);
            // A future's drop may wake, spawn or abandon.
            drop(table);
            drop(work);
        }
        self.party.replace(outside);
    }

    /// Takes the task out to be polled, or passes it to its party if that is behind.
    fn take_work(&self, header: &Arc<Header>) -> Option<(Rc<Party>, Work)> {
        let mut table = self.table.borrow_mut();
        // The place may be empty, or belong to a later task: then this was a late wake-up.
        let entry = table.get_mut(header.index).filter(|entry| Arc::ptr_eq(&entry.header, header));
        match entry {
            Some(entry) if entry.party.is_behind.get() => {
                entry.party.ready.borrow_mut().push_back(Arc::clone(header));
                None
            }
            Some(entry) => {
                // Before the poll: a wake-up during it counts for the next round.
                header.queued.clear();
                Some((Rc::clone(&entry.party), entry.work.take()?))
            }
            None => {
                header.queued.clear();
                None
            }
        }
    }

    /// As [`take_work`](Self::take_work), of the party that has its turn.
    fn take_work_behind(&self, header: &Arc<Header>) -> Option<Work> {
        let mut table = self.table.borrow_mut();
        header.queued.clear();
        let entry = table.get_mut(header.index).filter(|entry| Arc::ptr_eq(&entry.header, header));
        entry.and_then(|entry| entry.work.take())
    }

    /// Drops all tasks, those too that are spawned meanwhile, and forgets what is ready.
    pub(crate) fn clear(&self) {
        while !self.table.borrow().is_empty() {
            let table = self.table.take();
            drop(table);
        }
        self.ready.clear();
        for party in self.behind.take() {
            party.is_behind.set(false);
            party.ready.take();
        }
    }
}

impl Party {
    /// Says how many of its tasks were polled in this round.
    fn count_poll(&self, round: u64) -> u32 {
        let (last, polls) = self.polls.get();
        let polls = if last == round { polls + 1 } else { 1 };
        self.polls.set((round, polls));
        polls
    }
}
