//! Tasks of one loop: futures that stay on their thread, and the wakers that may be called from any.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use crate::event_loop::{self, Note, Remote};
use crate::queued::Queued;

/// What a waker points to. Shared with any thread; the future itself never leaves its loop.
pub(crate) struct Header {
    /// The place of the future in the loop's table, or `MAIN`.
    index: usize,
    /// Whether it is in the ready queue (or on its way there), so that it gets there once.
    queued: Queued,
    remote: Arc<Remote>,
}

/// The index of the future that `block_on` runs, which lives outside the table.
const MAIN: usize = usize::MAX;

impl Wake for Header {
    fn wake(self: Arc<Self>) {
        if self.queued.set() {
            Self::queue(self);
        }
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.queued.set() {
            Self::queue(Arc::clone(self));
        }
    }
}

impl Header {
    fn new(index: usize, queued: Queued, remote: &Arc<Remote>) -> Arc<Self> {
        Arc::new(Self { index, queued, remote: Arc::clone(remote) })
    }

    /// Puts the task into its loop's ready queue, from whatever thread.
    fn queue(self: Arc<Self>) {
        let mut header = Some(self);
        event_loop::try_current(|local| {
            if let Some(header) =
                header.take_if(|header| Arc::ptr_eq(&local.remote, &header.remote))
            {
                local.tasks.make_ready(header);
            }
        });
        if let Some(header) = header {
            let remote = Arc::clone(&header.remote);
            remote.post(Note::Ready(header));
        }
    }
}

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
#[derive(Default)]
pub(crate) struct Tasks {
    table: RefCell<slab::Slab<Entry>>,
    ready: RefCell<VecDeque<Arc<Header>>>,
    main_ready: Cell<bool>,
    /// Of the task that is polled.
    pub(crate) budget: Budget,
}

impl Tasks {
    /// Takes a future in, ready to be polled.
    pub(crate) fn add(&self, remote: &Arc<Remote>, future: Pin<Box<dyn Future<Output = ()>>>) {
        let mut table = self.table.borrow_mut();
        let place = table.vacant_entry();
        let header = Header::new(place.key(), Queued::new(true), remote);
        let waker = Waker::from(Arc::clone(&header));
        self.ready.borrow_mut().push_back(Arc::clone(&header));
        place.insert(Entry { header, work: Some(Work { future, waker }) });
    }

    /// The waker of the future that `block_on` runs.
    pub(crate) fn main_waker(&self, remote: &Arc<Remote>) -> Waker {
        self.main_ready.set(true);
        Waker::from(Header::new(MAIN, Queued::new(false), remote))
    }

    /// Queues a task for the next round.
    pub(crate) fn make_ready(&self, header: Arc<Header>) {
        if header.index == MAIN {
            header.queued.clear();
            self.main_ready.set(true);
        } else {
            self.ready.borrow_mut().push_back(header);
        }
    }

    /// Whether there is anything to poll.
    pub(crate) fn any_ready(&self) -> bool {
        self.main_ready.get() || !self.ready.borrow().is_empty()
    }

    /// Whether the main future is to be polled; not any more after this.
    pub(crate) fn take_main_ready(&self) -> bool {
        self.main_ready.take()
    }

    /// Polls every task that is ready now; those that become ready meanwhile wait for the next
    /// round, so that no task keeps the loop from its completions.
    pub(crate) fn run_ready(&self) {
        let count = self.ready.borrow().len();
        for _ in 0..count {
            let Some(header) = self.ready.borrow_mut().pop_front() else { return };
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
        self.ready.borrow_mut().clear();
        self.main_ready.set(false);
    }
}

/// The outcome of a spawned task, on the same thread. Dropping it lets the task run on.
pub struct Task<T>(Rc<Outcome<T>>);

struct Outcome<T> {
    value: Cell<Option<T>>,
    waiter: Cell<Option<Waker>>,
}

/// Runs a future on the current thread's loop.
///
/// # Panics
/// Outside of an event loop.
pub fn spawn<F>(future: F) -> Task<F::Output>
where
    F: Future + 'static,
    F::Output: 'static,
{
    let outcome = Rc::new(Outcome { value: Cell::new(None), waiter: Cell::new(None) });
    let result = Rc::clone(&outcome);
    spawn_detached(async move {
        result.value.set(Some(future.await));
        if let Some(waiter) = result.waiter.take() {
            waiter.wake();
        }
    });
    Task(outcome)
}

/// As [`spawn`], for a future whose end nobody waits for.
pub fn spawn_detached(future: impl Future<Output = ()> + 'static) {
    event_loop::current(|local| local.tasks.add(&local.remote, Box::pin(future)));
}

impl<T> Future for Task<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        match self.0.value.take() {
            Some(value) => Poll::Ready(value),
            None => {
                self.0.waiter.set(Some(cx.waker().clone()));
                Poll::Pending
            }
        }
    }
}
