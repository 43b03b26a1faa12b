//! Tasks of one loop: futures that stay on their thread.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Waker};

use crate::queued::Queued;
use crate::remote::{Header, MAIN, Ready, Remote};

struct Entry {
    header: Arc<Header>,
    /// Taken out while it is polled.
    work: Option<Work>,
}

struct Work {
    future: Pin<Box<dyn Future<Output = ()>>>,
    waker: Waker,
}

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
}

impl Tasks {
    /// The tasks of the loop that is reached by `remote`.
    pub(crate) fn new(remote: &Arc<Remote>) -> Self {
        Self {
            remote: Arc::clone(remote),
            ready: Ready::new(remote),
            table: RefCell::default(),
            budget: Budget::default(),
        }
    }

    /// Takes a future in, ready to be polled.
    pub(crate) fn add(&self, future: Pin<Box<dyn Future<Output = ()>>>) {
        let mut table = self.table.borrow_mut();
        let place = table.vacant_entry();
        let header = Header::new(place.key(), Queued::new(true), &self.remote);
        let waker = Waker::from(Arc::clone(&header));
        self.ready.push(Arc::clone(&header));
        place.insert(Entry { header, work: Some(Work { future, waker }) });
    }

    /// The waker of the future that `block_on` runs, which is to be polled at once.
    pub(crate) fn main_waker(&self) -> Waker {
        self.ready.set_main();
        Waker::from(Header::new(MAIN, Queued::new(false), &self.remote))
    }

    /// Polls every task that is ready now; those that become ready meanwhile wait for the next
    /// round, so that no task keeps the loop from its completions.
    pub(crate) fn run_ready(&self) {
        for _ in 0..self.ready.len() {
            let Some(header) = self.ready.pop() else { return };
            self.poll(&header);
        }
    }

    fn poll(&self, header: &Arc<Header>) {
        // Before the poll: a wake-up during it counts for the next round.
        header.queued.clear();
        let Some(mut work) = self.take_work(header) else { return };
        self.budget.renew();
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
    }

    fn take_work(&self, header: &Arc<Header>) -> Option<Work> {
        let mut table = self.table.borrow_mut();
        // The place may be empty, or belong to a later task: then this was a late wake-up.
        let entry = table.get_mut(header.index)?;
        if Arc::ptr_eq(&entry.header, header) { entry.work.take() } else { None }
    }

    /// Drops all tasks, those too that are spawned meanwhile, and forgets what is ready.
    pub(crate) fn clear(&self) {
        while !self.table.borrow().is_empty() {
            let table = self.table.take();
            drop(table);
        }
        self.ready.clear();
    }
}
