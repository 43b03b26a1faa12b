//! The loop of the current thread: its tasks, timers and operations in one place.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use crate::driver::{Completion, Driver, Rest};
use crate::engine::{Engine, EngineReport};
use crate::fixed::FixedFiles;
use crate::io_poll::IoPoll;
use crate::line::Ticket;
use crate::mapping::Mapping;
use crate::membership::Membership;
use crate::operation::{Operation, OperationTable, Token};
use crate::poll::{DEFAULT_POLLING, Outcome, Phase, Poller, Source};
use crate::remote::{Note, Ready, Remote};
use crate::task::Tasks;
use crate::timer::Timers;
use crate::watches::{WatchKey, Watches};

thread_local! {
    static CURRENT: RefCell<Option<Rc<Local>>> = const { RefCell::new(None) };
}

/// Everything of a loop that its own thread uses.
pub(crate) struct Local {
    pub(crate) remote: Arc<Remote>,
    pub(crate) tasks: Tasks,
    pub(crate) timers: Timers,
    pub(crate) watches: Watches,
    pub(crate) report: EngineReport,
    /// Whether completions on files are polled for where that is possible.
    pub(crate) io_poll: Cell<IoPoll>,
    driver: RefCell<Box<dyn Driver>>,
    operations: RefCell<OperationTable>,
    poller: RefCell<Poller>,
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

/// The engine of the current thread's loop.
pub(crate) fn engine() -> Option<Engine> {
    try_current(|local| local.report.engine)
}

impl Local {
    pub(crate) fn new(remote: Arc<Remote>, driver: Box<dyn Driver>, report: EngineReport) -> Self {
        Self {
            tasks: Tasks::new(&remote),
            remote,
            timers: Timers::default(),
            watches: Watches::default(),
            report,
            io_poll: Cell::new(IoPoll::Off),
            driver: RefCell::new(driver),
            operations: RefCell::new(OperationTable::new()),
            poller: RefCell::new(Poller::new(DEFAULT_POLLING)),
        }
    }

    /// Looks out for events at most this long before it sleeps.
    pub(crate) fn poll_at_most(&self, time: Duration) {
        *self.poller.borrow_mut() = Poller::new(time);
    }

    /// Whether the ring knows files by slots. No operation is under way.
    pub(crate) fn fix_files(&self, fixed: FixedFiles) {
        self.driver.borrow_mut().fix_files(fixed);
    }

    /// Whether completions on files are polled for. No operation is under way.
    pub(crate) fn set_io_poll(&self, io_poll: IoPoll) {
        self.io_poll.set(io_poll);
        self.driver.borrow_mut().io_poll(io_poll);
    }

    /// Puts memory into slots of the ring.
    pub(crate) fn register_memory(&self, memory: &Membership<Mapping>) -> io::Result<()> {
        self.driver.borrow_mut().register_memory(memory)
    }

    /// Gives back all slots of memory. No operation is under way.
    pub(crate) fn forget_all_memory(&self) {
        self.driver.borrow_mut().forget_all_memory();
    }

    /// Whether others have something for this loop, found without a system call.
    fn look(&self) -> bool {
        let source = self.watches.look();
        self.happened(source);
        source.is_some() || self.remote.mailbox.may_be_filled()
    }

    fn happened(&self, source: Option<Source>) {
        if let Some(source) = source {
            self.poller.borrow_mut().happened(source);
        }
    }

    /// The operations that the kernel has.
    pub(crate) fn running(&self) -> Vec<Token> {
        self.operations.borrow().running().collect()
    }

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
        let operation = operations.operation(token);
        self.driver.borrow_mut().start(token, operation);
        self.happened(Source::of(operation, Phase::Begun));
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
    pub(crate) fn cancel(&self, token: Token) {
        let operations = self.operations.borrow();
        let operation = operations.operation(token);
        if operation.is_on_socket() {
            self.driver.borrow_mut().cancel(token, operation);
        }
    }

    fn complete(&self, token: Token, result: i32) {
        let mut operations = self.operations.borrow_mut();
        self.happened(Source::of(operations.operation(token), Phase::Over));
        let waiter = operations.complete(token, result);
        drop(operations);
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

    /// Has the engine watch a descriptor.
    pub(crate) fn watch(&self, key: WatchKey, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        self.driver.borrow_mut().watch(key, descriptor)
    }

    /// Ends a watch.
    pub(crate) fn unwatch(&self, key: WatchKey, descriptor: BorrowedFd<'_>) {
        self.driver.borrow_mut().unwatch(key, descriptor);
    }

    /// One turn: rest if there is nothing to do, then pass on everything that happened meanwhile.
    pub(crate) fn turn(&self, done: &mut Vec<Completion>, notes: &mut Vec<Note>) {
        let news = self.look();
        let is_busy = news || !self.tasks.is_idle() || self.driver.borrow().is_polling();
        match is_busy {
            true => self.drive(Rest::Never, done),
            false => self.rest(done),
        }
        for Completion { token, result } in done.drain(..) {
            self.complete(token, result);
        }
        self.remote.mailbox.take(notes);
        if !notes.is_empty() {
            self.happened(Some(Source::NOTE));
        }
        for note in notes.drain(..) {
            match note {
                Note::Ready(header) => self.tasks.ready.push(header),
                Note::Call(call) => call(),
                Note::Completed(token, result) => self.complete(token, result),
                Note::Closed(number) => self.driver.borrow_mut().forget_file(&number),
                Note::Unused(mapping) => self.driver.borrow_mut().forget_memory(&mapping),
            }
        }
        self.timers.fire();
    }

    /// Waits until something happens: looks out for it if that is likely to pay, then sleeps.
    fn rest(&self, done: &mut Vec<Completion>) {
        let due = self.timers.next();
        let began = Instant::now();
        let window = self.poller.borrow_mut().window(began);
        let mut in_vain = Duration::ZERO;
        if let Some(window) = window {
            self.drive(Rest::Never, done);
            if !done.is_empty() || !self.tasks.ready.is_empty() {
                // Over as soon as it was submitted: that was no rest.
                return;
            }
            let until = due.map_or(began + window, |due| due.min(began + window));
            if self.look_out(until, done) {
                self.poller.borrow_mut().learn(began.elapsed(), Outcome::Caught);
                return;
            }
            in_vain = window;
        }
        self.sleep(due, done);
        self.poller.borrow_mut().learn(began.elapsed(), Outcome::Slept { in_vain });
    }

    /// Says whether something happened before the time came.
    fn look_out(&self, until: Instant, done: &mut Vec<Completion>) -> bool {
        while Instant::now() < until {
            if self.driver.borrow_mut().may_have_events() {
                self.drive(Rest::Never, done);
            }
            if !done.is_empty() || !self.tasks.ready.is_empty() || self.look() {
                return true;
            }
            std::hint::spin_loop();
        }
        false
    }

    fn sleep(&self, due: Option<Instant>, done: &mut Vec<Completion>) {
        if let Some(source) = self.watches.arm() {
            self.happened(Some(source));
            return self.drive(Rest::Never, done);
        }
        let rest = match due {
            _ if !self.remote.mailbox.fall_asleep() => return self.drive(Rest::Never, done),
            None => Rest::UntilEvent,
            Some(due) => Rest::UntilEventOr(due),
        };
        self.drive(rest, done);
        self.remote.mailbox.wake_up();
    }

    fn drive(&self, rest: Rest, done: &mut Vec<Completion>) {
        let mut driver = self.driver.borrow_mut();
        driver.turn(rest, &self.operations.borrow(), done);
        while let Some(key) = driver.next_event() {
            self.happened(self.watches.signal(key));
        }
    }
}

/// Makes a loop the current one of its thread, in place of the one that was it before.
pub(crate) struct Entered(Option<Rc<Local>>);

impl Entered {
    pub(crate) fn new(local: &Rc<Local>) -> Self {
        Self(enter(Some(Rc::clone(local))))
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let local = enter(self.0.take());
        drop(local);
    }
}

/// Changes the current loop of the thread; gives the former one.
fn enter(local: Option<Rc<Local>>) -> Option<Rc<Local>> {
    Ready::set_for_this_thread(local.as_ref().map(|local| &local.tasks.ready));
    CURRENT.replace(local)
}
