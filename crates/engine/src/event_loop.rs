//! The event loop: one per thread, with an engine of its own.
//!
//! A turn polls the tasks that are ready, then lets the engine submit everything they asked for and
//! reap everything that completed, with one system call where the engine can. Other threads reach a
//! loop through its [`Handle`]; see `mailbox` for what they are promised.

use std::cell::RefCell;
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use futures_channel::oneshot;

use crate::driver::{Completion, Driver, Rest};
use crate::engine::{self, Engine, EngineChoice, EngineReport};
use crate::line::Ticket;
use crate::mailbox::{Bell, Mailbox};
use crate::operation::{Operation, OperationTable, Token};
use crate::task::{Header, Tasks};
use crate::thread_pool::ThreadPool;
use crate::timer::Timers;

/// How often the tasks that are ready are polled between two system calls. A request goes from task
/// to task (receiver, worker, sender), and with a turn for each hand-over it would cost that many
/// system calls.
const ROUNDS: usize = 3;

thread_local! {
    static CURRENT: RefCell<Option<Rc<Local>>> = const { RefCell::new(None) };
}

/// What other threads tell a loop.
pub(crate) enum Note {
    /// A task became ready.
    Ready(Arc<Header>),
    /// Run this; it does nothing but spawn a task.
    Call(Box<dyn FnOnce() + Send>),
    /// A worker thread finished an operation.
    Completed(Token, i32),
}

/// The part of a loop that other threads see.
pub(crate) struct Remote {
    mailbox: Mailbox<Note>,
    /// An eventfd: what wakes the sleeping loop.
    bell: OwnedFd,
}

impl Remote {
    /// Leaves a note and wakes the loop if it must be.
    pub(crate) fn post(&self, note: Note) {
        if self.mailbox.post(note) == Bell::Ring {
            // It can only fail when the counter is full, and then the loop is being woken already.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
    }

    /// What the engine watches while the loop sleeps.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

/// Everything of a loop that its own thread uses.
pub(crate) struct Local {
    pub(crate) remote: Arc<Remote>,
    pub(crate) tasks: Tasks,
    pub(crate) timers: Timers,
    pub(crate) pool: Arc<ThreadPool>,
    pub(crate) report: EngineReport,
    driver: RefCell<Box<dyn Driver>>,
    operations: RefCell<OperationTable>,
}

/// Runs `f` with the current thread's loop. `f` must not call anybody who might run a loop.
///
/// # Panics
/// Outside of an event loop.
pub(crate) fn current<R>(f: impl FnOnce(&Rc<Local>) -> R) -> R {
    try_current(f).expect("this needs an event loop: call it inside of EventLoop::block_on")
}

/// As [`current`], with `None` where there is no loop.
pub(crate) fn try_current<R>(f: impl FnOnce(&Rc<Local>) -> R) -> Option<R> {
    CURRENT.try_with(|current| current.borrow().as_ref().map(f)).ok().flatten()
}

impl Local {
    /// Does the operation on the spot, where that needs no waiting.
    pub(crate) fn attempt(&self, operation: &Operation) -> Option<i32> {
        self.driver.borrow_mut().attempt(operation)
    }

    /// Takes the operation out of `operation` and starts it. When all places are taken, the waker is
    /// called when one is free for the ticket.
    pub(crate) fn start(
        &self,
        operation: &mut Option<Operation>,
        ticket: Option<Ticket>,
        waiter: &Waker,
    ) -> Result<Token, Ticket> {
        let mut operations = self.operations.borrow_mut();
        let token = operations.insert(operation, ticket, waiter)?;
        self.driver.borrow_mut().start(token, operations.operation(token));
        Ok(token)
    }

    /// Gives up waiting for a place.
    pub(crate) fn leave_line(&self, ticket: Ticket) {
        let next = self.operations.borrow_mut().leave_line(ticket);
        next.into_iter().for_each(Waker::wake);
    }

    pub(crate) fn poll_result(&self, token: Token, waiter: &Waker) -> Poll<(i32, Operation)> {
        let result = self.operations.borrow_mut().result(token, waiter);
        match result {
            Some(result) => Poll::Ready((result, self.release(token))),
            None => Poll::Pending,
        }
    }

    /// Leaves an operation to itself; one that may wait without bound is asked to stop.
    pub(crate) fn abandon(&self, token: Token) {
        let result = self.operations.borrow_mut().abandon(token);
        match result {
            Some(result) => self.release(token).bury(result),
            None => self.cancel(token),
        }
    }

    /// Asks a running operation to stop if it may wait without bound.
    fn cancel(&self, token: Token) {
        let operations = self.operations.borrow();
        let operation = operations.operation(token);
        if operation.is_on_socket() {
            self.driver.borrow_mut().cancel(token, operation);
        }
    }

    fn complete(&self, token: Token, result: i32) {
        let waiter = self.operations.borrow_mut().complete(token, result);
        match waiter {
            Some(waiter) => waiter.wake(),
            None => self.release(token).bury(result),
        }
    }

    fn release(&self, token: Token) -> Operation {
        let (operation, next) = self.operations.borrow_mut().release(token);
        next.into_iter().for_each(Waker::wake);
        operation
    }

    /// One turn: sleep as allowed, then pass on everything that happened meanwhile.
    fn turn(&self, done: &mut Vec<Completion>, notes: &mut Vec<Note>) {
        let asleep = !self.tasks.any_ready() && self.remote.mailbox.fall_asleep();
        let rest = match self.timers.next() {
            _ if !asleep => Rest::Never,
            None => Rest::UntilEvent,
            Some(due) => Rest::UntilEventOr(due),
        };
        self.driver.borrow_mut().turn(rest, &self.operations.borrow(), done);
        if asleep {
            self.remote.mailbox.wake_up();
        }
        for Completion { token, result } in done.drain(..) {
            self.complete(token, result);
        }
        self.remote.mailbox.take(notes);
        for note in notes.drain(..) {
            match note {
                Note::Ready(header) => self.tasks.make_ready(header),
                Note::Call(call) => call(),
                Note::Completed(token, result) => self.complete(token, result),
            }
        }
        self.timers.fire();
    }
}

/// A loop that runs futures on this thread. It stays on the thread that made it.
pub struct EventLoop {
    local: Rc<Local>,
    done: Vec<Completion>,
    notes: Vec<Note>,
}

impl EventLoop {
    /// A loop with the engine that `choice` allows.
    ///
    /// # Errors
    /// When the engine that was asked for cannot be had here, with the kernel's reason; `Auto`
    /// always finds one.
    pub fn new(choice: EngineChoice) -> io::Result<Self> {
        let bell = rustix::event::eventfd(
            0,
            rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK,
        )?;
        let remote = Arc::new(Remote { mailbox: Mailbox::new(), bell });
        let pool = ThreadPool::shared();
        let (driver, report) = engine::open(choice, &remote, &pool)?;
        let local = Local {
            remote,
            tasks: Tasks::default(),
            timers: Timers::default(),
            pool,
            report,
            driver: RefCell::new(driver),
            operations: RefCell::new(OperationTable::new()),
        };
        Ok(Self { local: Rc::new(local), done: Vec::new(), notes: Vec::new() })
    }

    /// What other threads reach this loop by.
    pub fn handle(&self) -> Handle {
        Handle(Arc::clone(&self.local.remote))
    }

    /// The engine in use.
    pub fn engine(&self) -> Engine {
        self.local.report.engine
    }

    /// The engine in use and why.
    pub fn report(&self) -> &EngineReport {
        &self.local.report
    }

    /// Runs `future` and everything that is spawned meanwhile, until `future` is ready.
    ///
    /// # Panics
    /// Inside of another loop.
    pub fn block_on<F: Future>(&mut self, future: F) -> F::Output {
        assert!(try_current(|_| ()).is_none(), "an event loop cannot run inside of another");
        let _entered = Entered::new(&self.local);
        let local = Rc::clone(&self.local);
        let waker = local.tasks.main_waker(&local.remote);
        let mut future = pin!(future);
        loop {
            if local.tasks.take_main_ready() {
                local.tasks.budget.renew();
                let poll = future.as_mut().poll(&mut Context::from_waker(&waker));
                if let Poll::Ready(output) = poll {
                    return output;
                }
            }
            for _ in 0..ROUNDS {
                local.tasks.run_ready();
            }
            local.turn(&mut self.done, &mut self.notes);
        }
    }
}

impl Drop for EventLoop {
    /// Drops all tasks, then waits until the kernel has given back everything that it holds.
    fn drop(&mut self) {
        let local = &self.local;
        let _entered = Entered::new(local);
        local.tasks.clear();
        // Those whose futures live on elsewhere have not been asked yet.
        let running: Vec<Token> = local.operations.borrow().running().collect();
        running.into_iter().for_each(|token| local.cancel(token));
        while local.operations.borrow().running().next().is_some() {
            local.turn(&mut self.done, &mut self.notes);
            // Nothing is run any more: neither what came in, nor what was woken.
            local.tasks.clear();
        }
        drop(local.remote.mailbox.close());
    }
}

/// Makes a loop the current one of its thread, in place of the one that was it before.
struct Entered(Option<Rc<Local>>);

impl Entered {
    fn new(local: &Rc<Local>) -> Self {
        Self(CURRENT.replace(Some(Rc::clone(local))))
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let local = CURRENT.replace(self.0.take());
        drop(local);
    }
}

/// Reaches a loop from any thread.
#[derive(Clone)]
pub struct Handle(Arc<Remote>);

impl Handle {
    /// The loop of the current thread.
    ///
    /// # Panics
    /// Outside of an event loop.
    pub fn current() -> Self {
        current(|local| Self(Arc::clone(&local.remote)))
    }

    /// Runs the future that `make` makes on the loop's thread. The loop is woken if it sleeps, once
    /// for all that is submitted before it runs again.
    pub fn spawn<F, R>(&self, make: impl FnOnce() -> F + Send + 'static) -> Submission<R>
    where
        F: Future<Output = R> + 'static,
        R: Send + 'static,
    {
        let (sender, receiver) = oneshot::channel();
        self.0.post(Note::Call(Box::new(move || {
            crate::task::spawn_detached(async move {
                // Nobody may be waiting any more; the task has run all the same.
                let _ = sender.send(make().await);
            });
        })));
        Submission(receiver)
    }
}

/// The outcome of what was submitted through a [`Handle`]. Dropping it lets the task run on.
pub struct Submission<R>(oneshot::Receiver<R>);

impl<R> Submission<R> {
    /// Blocks the calling thread, which must not be the loop's, until the outcome is there; `None`
    /// when the loop ended before.
    pub fn wait(self) -> Option<R> {
        futures_executor::block_on(self)
    }
}

impl<R> Future for Submission<R> {
    type Output = Option<R>;

    fn poll(mut self: std::pin::Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        std::pin::Pin::new(&mut self.0).poll(cx).map(Result::ok)
    }
}
