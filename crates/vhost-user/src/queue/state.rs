//! The shared state of one queue's tasks: the ring task, and the handlers.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::task::{Context, Waker};

use blockhouse_core::{
    Durability, Error, ErrorKind, InFlight, Request, Result, Storage, WriteCache, errno,
};
use blockhouse_disk::{Access, Disk, PartyHold};
use blockhouse_engine::PollSource;

use super::command::StopMode;
use super::handler::Handlers;
use super::kicks::Kick;
use super::virtqueue::Virtqueue;
use crate::block::{QUEUE_LIMITS, RequestContext, RequestLimits, SERIAL_BYTES, WriteCacheMode};
use crate::ring::Broken;

/// The parameters that a queue is started with.
pub struct Setup<S: Storage> {
    /// The disk.
    pub disk: Arc<Disk<S>>,
    /// Whether the guest may change the disk.
    pub access: Access,
    /// The disk's serial, padded with zeros.
    pub serial: [u8; SERIAL_BYTES],
    /// The current write cache mode, which decides how durable writes are.
    pub cache: Arc<WriteCacheMode>,
    /// The ring and its state.
    pub virtqueue: Virtqueue,
    /// How the guest kicks.
    pub kick: Kick,
    /// The maximum size of a request.
    pub limits: RequestLimits,
    /// Called at most once, when an error of the driver or a loss of memory breaks the queue.
    pub error_handler: Box<dyn Fn(&Broken)>,
}

/// A running queue.
pub struct Queue<S: Storage> {
    /// The disk.
    pub(super) disk: Arc<Disk<S>>,
    /// Whether the guest may change the disk.
    access: Access,
    serial: [u8; SERIAL_BYTES],
    cache: Arc<WriteCacheMode>,
    /// The ring and its state.
    pub(super) virtqueue: RefCell<Virtqueue>,
    limits: RequestLimits,
    error_handler: Box<dyn Fn(&Broken)>,
    /// The handlers that execute requests.
    pub(super) handlers: Handlers,
    /// Requests that were popped and did not complete yet.
    pub(super) in_flight: InFlight,
    /// Whether the last requests completed asynchronously. If so, a handler is woken for each
    /// request.
    pub(super) recently_async: Cell<bool>,
    stop: Cell<Option<StopMode>>,
    /// The queue's writes that wait for free space on the host.
    held: PartyHold<S>,
    /// Whether the ring task has ended, so that the handlers must end too.
    is_ended: Cell<bool>,
    /// Whether a failure of the host was logged.
    has_logged_failure: Cell<bool>,
    /// Whether the guest does not kick.
    is_polled: Cell<bool>,
    /// Whether the ring task has to process the ring.
    wake_pending: Cell<bool>,
    ring_task: RefCell<Option<Waker>>,
}

impl<S: Storage> Queue<S> {
    /// Returns a queue without handlers, and the kick of `setup`.
    pub fn new(setup: Setup<S>) -> (Self, Kick) {
        let Setup { disk, access, serial, cache, virtqueue, kick, limits, error_handler } = setup;
        let queue = Self {
            held: PartyHold::of_current(&disk),
            disk,
            access,
            serial,
            cache,
            handlers: Handlers::new(virtqueue.entries().min(QUEUE_LIMITS.requests)),
            virtqueue: RefCell::new(virtqueue),
            limits,
            error_handler,
            in_flight: InFlight::new(QUEUE_LIMITS),
            recently_async: Cell::new(false),
            stop: Cell::new(None),
            is_ended: Cell::new(false),
            has_logged_failure: Cell::new(false),
            is_polled: Cell::new(false),
            // The ring may contain requests already.
            wake_pending: Cell::new(true),
            ring_task: RefCell::default(),
        };
        (queue, kick)
    }

    /// Stores the waker of the ring task.
    pub fn register_ring_task(&self, context: &Context<'_>) {
        let mut ring_task = self.ring_task.borrow_mut();
        match &mut *ring_task {
            Some(waker) => waker.clone_from(context.waker()),
            None => *ring_task = Some(context.waker().clone()),
        }
    }

    /// Makes the ring task process the ring, after all ready tasks were polled.
    pub fn wake_ring_task(&self) {
        if !self.wake_pending.replace(true)
            && let Some(ring_task) = &*self.ring_task.borrow()
        {
            ring_task.wake_by_ref();
        }
    }

    /// As [`wake_ring_task`](Self::wake_ring_task), from the ring task itself.
    pub fn set_wake_pending(&self) {
        self.wake_pending.set(true);
    }

    /// Clears the mark that the ring task was woken. Returns whether the mark was set.
    pub fn take_wake_pending(&self) -> bool {
        self.wake_pending.take()
    }

    /// The mode of the requested stop; `None` if the queue shall not stop.
    pub fn stop_mode(&self) -> Option<StopMode> {
        self.stop.get()
    }

    /// Makes changes that wait for free space fail, because a caller that waits for the end of the
    /// queue must not wait for space.
    pub fn end_holding(&self) {
        self.held.end();
    }

    /// Tells the queue to end in this mode. `Disconnected` is not replaced by another mode.
    pub fn stop(&self, mode: StopMode) {
        if self.stop.get() != Some(StopMode::Disconnected) {
            self.stop.set(Some(mode));
        }
        if mode == StopMode::Disconnected {
            self.end_holding();
        }
    }

    /// Cancels a graceful stop. A queue that is disconnected or broken stays stopped.
    pub fn take_back_stop(&self) {
        if self.stop.get() == Some(StopMode::Graceful) {
            self.stop.set(None);
        }
    }

    /// Whether a stop is complete.
    pub fn is_stopped(&self) -> bool {
        self.stop.get().is_some() && self.in_flight.is_idle() && self.left_to_resubmit() == 0
    }

    /// Ends the handlers.
    pub fn end(&self) {
        self.is_ended.set(true);
        self.handlers.notify_idle();
    }

    /// Whether handlers are to end.
    pub fn is_ended(&self) -> bool {
        self.is_ended.get()
    }

    /// Sets whether the guest does not kick.
    pub fn set_polled(&self, is_polled: bool) {
        self.is_polled.set(is_polled);
    }

    /// How many requests have to be resubmitted before a graceful stop is complete. A disconnected
    /// queue resubmits none: the in-flight log keeps these requests for the next server.
    pub fn left_to_resubmit(&self) -> usize {
        match self.stop.get() {
            Some(StopMode::Disconnected) => 0,
            Some(StopMode::Graceful) | None => self.virtqueue.borrow().left_to_resubmit(),
        }
    }

    /// Whether one more request may be in flight. Its length is not known yet, so the limit on
    /// bytes may be exceeded by one request.
    pub fn has_room(&self) -> bool {
        self.in_flight.admits(1)
    }

    /// Whether the queue could pop a request now, if the ring had one.
    fn has_free_handler(&self) -> bool {
        self.handlers.has_free() && self.stop.get().is_none() && self.has_room()
    }

    /// Whether the ring has a request that the queue could pop now.
    pub fn has_work(&self) -> bool {
        self.has_free_handler() && self.virtqueue.borrow().has_available()
    }

    /// The facts that the decoding of a request depends on.
    pub fn request_context(&self) -> RequestContext<'_> {
        let durability = match self.cache.state() {
            WriteCache::Volatile => Durability::None,
            WriteCache::None => Durability::Data,
        };
        let (size, limits) = (self.disk.size(), self.limits);
        RequestContext { durability, serial: &self.serial, size, limits }
    }

    /// Refuses changes through a read-only export.
    pub fn check_access(&self, request: &Request) -> Result<()> {
        match self.access {
            Access::ReadOnly if request.is_change() => {
                let what = "a change by way of an export that is read-only";
                Err(Error::new(ErrorKind::ReadOnly, what).on(self.disk.name()))
            }
            _ => Ok(()),
        }
    }

    /// Whether data read from the ring or the guest's memory may be wrong, because memory can no
    /// longer be accessed.
    pub fn has_lost_memory(&self) -> bool {
        self.virtqueue.borrow().has_lost_memory()
    }

    /// Breaks the queue after an error of its driver or a loss of memory: no more requests are
    /// popped. Has no effect if a stop was requested before.
    pub fn break_off(&self, why: &Broken) {
        // Lost memory reads as zeros, which may look like a violation of the rules by the driver.
        let why = if self.has_lost_memory() { &Broken::MemoryLost } else { why };
        if self.stop.get().is_none() {
            self.stop.set(Some(StopMode::Disconnected));
            (self.error_handler)(why);
        }
    }

    /// Logs that a request failed on the host. Logged once for each queue, because a broken disk
    /// fails every request.
    pub fn log_failure(&self, error: &Error) {
        if self.has_lost_memory() {
            // The loss of memory is logged at the end of the connection.
            return;
        }
        let disk = self.disk.name();
        if error.errno() == errno::EFAULT {
            // EFAULT is no failure of the host: the guest gave invalid addresses, or its memory is
            // being lost. The loss is logged at the end of the connection.
            tracing::debug!(disk, "no memory is at the addresses of a guest's request: {error}");
            return;
        }
        if error.is_host_failure() && !self.has_logged_failure.replace(true) {
            tracing::warn!(disk, "a guest's request failed: {error}");
        }
    }
}

impl<S: Storage> PollSource for Queue<S> {
    fn is_ready(&self) -> bool {
        self.has_work()
    }

    fn enable_notify(&self) -> bool {
        if self.is_polled.get() {
            self.has_work()
        } else {
            self.has_free_handler() && self.virtqueue.borrow_mut().enable_notify()
        }
    }
}
