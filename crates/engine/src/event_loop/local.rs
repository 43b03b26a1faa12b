//! The loop of the current thread: its tasks, timers and operations in one place.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use blockhouse_core::metrics::{Timestamp, clock};

use crate::driver::adaptive_poll::{DEFAULT_POLLING, EventSource, Phase, PollGovernor, PollResult};
use crate::driver::engine::{Engine, EngineReport};
use crate::driver::fixed_files::FixedFiles;
use crate::driver::io_poll::IoPoll;
use crate::driver::lone_writes::LoneWrites;
use crate::driver::loop_shared::{LoopMessage, LoopShared, Ready};
use crate::driver::operation::{Operation, OperationTable, Token};
use crate::driver::registrations::Registrations;
use crate::driver::system_call::FileCall;
use crate::driver::thread_pool::ThreadPool;
use crate::driver::wait_queue::Ticket;
use crate::driver::watches::{WatchKey, Watches};
use crate::driver::{Completion, Driver, Wait};
use crate::event_loop::task::Tasks;
use crate::event_loop::timer::Timers;
use crate::mapping::Mapping;

thread_local! {
    static CURRENT: RefCell<Option<Rc<Local>>> = const { RefCell::new(None) };
}

/// The parts of a loop that its own thread uses.
pub(crate) struct Local {
    pub(crate) shared: Arc<LoopShared>,
    pub(crate) tasks: Tasks,
    pub(crate) timers: Timers,
    pub(crate) watches: Watches,
    pub(crate) report: EngineReport,
    /// Whether completions on files are polled for if possible.
    pub(crate) io_poll: Cell<IoPoll>,
    driver: RefCell<Box<dyn Driver>>,
    operations: RefCell<OperationTable>,
    governor: RefCell<PollGovernor>,
    lone_writes: RefCell<LoneWrites>,
}

/// Runs `f` with the current thread's loop. `f` must not call anything that may run a loop.
///
/// # Panics
/// Outside of an event loop.
pub(crate) fn current<R>(f: impl FnOnce(&Rc<Local>) -> R) -> R {
    try_current(f).expect("this needs an event loop: call it inside of EventLoop::block_on")
}

/// As [`current`], with `None` if there is no loop.
pub(crate) fn try_current<R>(f: impl FnOnce(&Rc<Local>) -> R) -> Option<R> {
    CURRENT.try_with(|current| current.borrow().as_ref().map(f)).ok().flatten()
}

/// The engine of the current thread's loop.
pub(crate) fn engine() -> Option<Engine> {
    try_current(|local| local.report.engine)
}

impl Local {
    pub(crate) fn new(
        shared: Arc<LoopShared>,
        driver: Box<dyn Driver>,
        report: EngineReport,
    ) -> Self {
        Self {
            tasks: Tasks::new(&shared),
            shared,
            timers: Timers::default(),
            watches: Watches::default(),
            lone_writes: RefCell::new(LoneWrites::new(report.engine)),
            report,
            io_poll: Cell::new(IoPoll::Off),
            driver: RefCell::new(driver),
            operations: RefCell::new(OperationTable::new()),
            governor: RefCell::new(PollGovernor::new(DEFAULT_POLLING)),
        }
    }

    /// Sets the maximum time for which the loop busy-polls for events before it sleeps.
    pub(crate) fn set_max_poll_time(&self, time: Duration) {
        *self.governor.borrow_mut() = PollGovernor::new(time);
    }

    /// Sets whether the ring identifies files by slots. No operation may be in flight.
    pub(crate) fn set_fixed_files(&self, fixed: FixedFiles) {
        self.driver.borrow_mut().set_fixed_files(fixed);
    }

    /// Sets whether completions on files are polled for. No operation is in flight.
    pub(crate) fn set_io_poll(&self, io_poll: IoPoll) {
        self.io_poll.set(io_poll);
        self.driver.borrow_mut().io_poll(io_poll);
    }

    /// Puts memory into slots of the ring.
    pub(crate) fn register_memory(&self, memory: &Registrations<Mapping>) -> io::Result<()> {
        self.driver.borrow_mut().register_memory(memory)
    }

    /// Takes slots of the ring for the kernel's pages. See [`Driver`].
    pub(crate) fn reserve_slots(&self, count: u16) -> io::Result<(usize, Vec<u16>)> {
        self.driver.borrow_mut().reserve_slots(count)
    }

    /// Gives such slots back.
    pub(crate) fn release_slots(&self, slots: Vec<u16>) {
        self.driver.borrow_mut().release_slots(slots);
    }

    /// Frees all slots of memory. No operation is in flight.
    pub(crate) fn unregister_all_memory(&self) {
        self.driver.borrow_mut().unregister_all_memory();
    }

    /// Opens a file by the ring; see [`Driver`].
    #[cfg(debug_assertions)]
    pub(crate) fn attempt_open(&self) -> Option<i32> {
        self.driver.borrow_mut().attempt_open()
    }

    /// Whether a poll source or another thread has something for this loop. Makes no system call.
    fn poll_sources(&self) -> bool {
        let source = self.watches.find_ready();
        self.note_event(source);
        source.is_some() || self.shared.mailbox.may_have_messages()
    }

    fn note_event(&self, source: Option<EventSource>) {
        if let Some(source) = source {
            self.governor.borrow_mut().note_event(source);
        }
    }

    /// The operations that are in flight in the kernel.
    pub(crate) fn in_flight(&self) -> Vec<Token> {
        self.operations.borrow().in_flight().collect()
    }

    /// Whether the kernel has operations other than commands to devices.
    pub(crate) fn has_transfers_in_flight(&self) -> bool {
        let operations = self.operations.borrow();
        let is_transfer = |token| !matches!(operations.operation(token), Operation::Command(_));
        operations.in_flight().any(is_transfer)
    }

    /// Adds an operation that the kernel never completes.
    #[cfg(test)]
    pub(crate) fn hold(&self, operation: Operation) {
        let inserted =
            self.operations.borrow_mut().insert(&mut Some(operation), None, Waker::noop());
        assert!(inserted.is_ok(), "there is a free slot");
    }

    /// Carries out the operation inline, if that needs no waiting.
    pub(crate) fn try_inline(&self, operation: &Operation) -> Option<i32> {
        self.driver.borrow_mut().try_inline(operation)
    }

    /// Takes the operation out of `operation` and starts it. If all slots are taken, the waker is
    /// called as soon as one is free for the ticket.
    pub(crate) fn start(
        &self,
        operation: &mut Option<Operation>,
        ticket: Option<Ticket>,
        waiter: &Waker,
    ) -> Result<Token, Ticket> {
        let mut operations = self.operations.borrow_mut();
        let token = operations.insert(operation, ticket, waiter)?;
        let operation = operations.operation(token);
        let try_by_thread = || {
            let pool = ThreadPool::shared();
            // The call needs memory: data in the kernel's pages is copied there, so the question is
            // asked first.
            if !pool.has_idle_thread() {
                return false;
            }
            let Some(call) = FileCall::of(operation) else { return false };
            // SAFETY: the operation stays in the table, unmoved, until its completion, which the
            // mailbox reports.
            unsafe { pool.try_run_file(call, token, &self.shared) }
        };
        if !self.lone_writes.borrow_mut().start(token, operation, try_by_thread) {
            self.driver.borrow_mut().start(token, operation);
        }
        self.note_event(EventSource::of(operation, Phase::Submitted));
        Ok(token)
    }

    /// Cancels a wait for a slot.
    pub(crate) fn cancel_wait(&self, ticket: Ticket) {
        let next = self.operations.borrow_mut().cancel_wait(ticket);
        next.into_iter().for_each(Waker::wake);
    }

    pub(crate) fn poll_result(&self, token: Token, waiter: &Waker) -> Poll<(i32, Operation)> {
        let result = self.operations.borrow_mut().result(token, waiter);
        match result {
            Some(result) => Poll::Ready((result, self.release(token))),
            None => Poll::Pending,
        }
    }

    /// The future of an operation was dropped. The operation continues; an operation on a socket is
    /// cancelled.
    pub(crate) fn detach(&self, token: Token) {
        let result = self.operations.borrow_mut().detach(token);
        match result {
            Some(result) => self.release(token).discard_result(result),
            None => self.cancel(token),
        }
    }

    /// Asks an operation in flight to stop if it is on a socket, where it may wait without bound.
    pub(crate) fn cancel(&self, token: Token) {
        let operations = self.operations.borrow();
        let operation = operations.operation(token);
        if operation.is_on_socket() {
            self.driver.borrow_mut().cancel(token, operation);
        }
    }

    /// Cancels the operation of a waiting future if it is on a socket. The operation may have
    /// completed already.
    pub(crate) fn stop(&self, token: Token) {
        if self.operations.borrow().is_in_flight(token) {
            self.cancel(token);
        }
    }

    fn complete(&self, token: Token, result: i32) {
        let mut operations = self.operations.borrow_mut();
        let operation = operations.operation(token);
        self.lone_writes.borrow_mut().complete(token, operation, result);
        self.note_event(EventSource::of(operation, Phase::Completed));
        let waiter = operations.complete(token, result);
        drop(operations);
        match waiter {
            Some(waiter) => waiter.wake(),
            None => self.release(token).discard_result(result),
        }
    }

    fn release(&self, token: Token) -> Operation {
        let (operation, next) = self.operations.borrow_mut().release(token);
        next.into_iter().for_each(Waker::wake);
        operation
    }

    /// Makes the engine watch a descriptor.
    pub(crate) fn watch(&self, key: WatchKey, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        self.driver.borrow_mut().watch(key, descriptor)
    }

    /// Ends a watch.
    pub(crate) fn unwatch(&self, key: WatchKey, descriptor: BorrowedFd<'_>) {
        self.driver.borrow_mut().unwatch(key, descriptor);
    }

    /// One iteration: waits if there is nothing to do, then passes on everything that has happened.
    pub(crate) fn poll(&self, done: &mut Vec<Completion>, messages: &mut Vec<LoopMessage>) {
        let has_events = self.poll_sources();
        let is_busy = has_events || !self.tasks.is_idle() || self.driver.borrow().is_polling();
        if is_busy {
            self.run_driver(Wait::Never, done)
        } else {
            self.wait(done)
        }
        for Completion { token, result } in done.drain(..) {
            self.complete(token, result);
        }
        self.shared.mailbox.take(messages);
        if !messages.is_empty() {
            self.note_event(Some(EventSource::MESSAGE));
        }
        for message in messages.drain(..) {
            match message {
                LoopMessage::Ready(header) => self.tasks.ready.push(header),
                LoopMessage::Call(call) => call(),
                LoopMessage::Completed(token, result) => self.complete(token, result),
                LoopMessage::Closed(number) => self.driver.borrow_mut().unregister_file(&number),
                LoopMessage::Unused(mapping) => {
                    self.driver.borrow_mut().unregister_memory(&mapping)
                }
            }
        }
        self.timers.fire();
    }

    /// Waits until something happens: busy-polls if that is likely to be faster, then sleeps.
    fn wait(&self, done: &mut Vec<Completion>) {
        let due = self.timers.next();
        let began = clock::read_now();
        let poll_time = self.governor.borrow_mut().poll_time(began);
        let mut wasted = Duration::ZERO;
        if let Some(poll_time) = poll_time {
            self.run_driver(Wait::Never, done);
            if !done.is_empty() || !self.tasks.ready.is_empty() {
                // An operation completed at its submission: that was no wait.
                return;
            }
            let until = due.map_or(began + poll_time, |due| due.min(began + poll_time));
            if self.busy_poll(until, done) {
                self.governor.borrow_mut().update(clock::now().since(began), PollResult::Hit);
                return;
            }
            wasted = poll_time;
        }
        self.sleep(due, done);
        let interval = clock::now().since(began);
        self.governor.borrow_mut().update(interval, PollResult::Slept { wasted });
    }

    /// Busy-polls until `until`. Returns whether an event arrived in time.
    fn busy_poll(&self, until: Timestamp, done: &mut Vec<Completion>) -> bool {
        while clock::read_now() < until {
            if self.driver.borrow_mut().may_have_events() {
                self.run_driver(Wait::Never, done);
            }
            if !done.is_empty() || !self.tasks.ready.is_empty() || self.poll_sources() {
                return true;
            }
            std::hint::spin_loop();
        }
        false
    }

    fn sleep(&self, due: Option<Timestamp>, done: &mut Vec<Completion>) {
        if let Some(source) = self.watches.enable_notify() {
            self.note_event(Some(source));
            return self.run_driver(Wait::Never, done);
        }
        let wait = match due {
            _ if !self.shared.mailbox.prepare_to_sleep() => {
                return self.run_driver(Wait::Never, done);
            }
            None => Wait::Event,
            // The clock reading is as new as the start of the wait, or as its busy-polling.
            Some(due) => Wait::AtMost(due.since(clock::now())),
        };
        self.run_driver(wait, done);
        self.shared.mailbox.wake_up();
    }

    fn run_driver(&self, wait: Wait, done: &mut Vec<Completion>) {
        let mut driver = self.driver.borrow_mut();
        driver.poll(wait, &self.operations.borrow(), done);
        // Completions get the present time, and so do requests that begin in this iteration.
        clock::renew();
        while let Some(key) = driver.next_event() {
            self.note_event(self.watches.signal(key));
        }
    }
}

/// Makes a loop the current one of its thread, until the guard restores the former one.
pub(crate) struct EnterGuard(Option<Rc<Local>>);

impl EnterGuard {
    pub(crate) fn new(local: &Rc<Local>) -> Self {
        Self(enter(Some(Rc::clone(local))))
    }
}

impl Drop for EnterGuard {
    fn drop(&mut self) {
        let local = enter(self.0.take());
        drop(local);
    }
}

/// Changes the current loop of the thread; returns the former one.
fn enter(local: Option<Rc<Local>>) -> Option<Rc<Local>> {
    Ready::set_for_this_thread(local.as_ref().map(|local| &local.tasks.ready));
    // Each iteration renews the shared clock reading.
    clock::set_shared(local.is_some());
    CURRENT.replace(local)
}
