//! An open image and its operations in flight. Any number of loops can begin and complete
//! operations.
//!
//! librbd signals an eventfd for each completion. Each loop that has begun an operation watches the
//! eventfd, and fetches all completions. So a loop's operations complete without help from another
//! thread. Operations of a loop that has ended are completed by the other loops, or by the close.
//!
//! Guarantees:
//! - Every operation that was begun completes, also while the image is being closed, and its memory
//!   is kept until then.
//! - One blocking call runs at a time. A call whose future was dropped runs to its end, and later
//!   calls and the close wait for it.
//! - After the cluster has fenced this client (put it on the blocklist), every operation fails with
//!   the first error that reported this.

use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::thread::ThreadId;

use blockhouse_core::sync::ErrorLatch;
use blockhouse_core::{Error, ErrorKind, Result, errno};
use blockhouse_engine::{Watch, spawn_detached};
use parking_lot::{Mutex, RwLock};

use super::ffi::{self, Command, Completion, Waiter};
use super::slot::Slot;
use crate::blocking::run_blocking;
use crate::detached::DetachedSyncs;

/// The hint if this client was fenced.
const FENCED_HINT: &str = "this client was fenced (put on the cluster's blocklist), so another may use the image now: \
                           make sure that it is free, then open it again";

/// An image of librbd with our waiters.
pub(super) type Image = ffi::Image<Pending>;

/// The state of an operation in flight in librbd.
pub(super) struct Pending {
    outcomes: Arc<Outcomes>,
    slot: Arc<Slot>,
    what: &'static str,
    offset: Option<u64>,
}

impl Waiter for Pending {
    fn complete(self, completion: Completion) {
        let Self { outcomes, slot, what, offset } = self;
        let outcome = completion.map_err(|error| outcomes.error(what, offset, error));
        slot.complete(outcome, &outcomes.detached);
    }
}

/// The results of operations.
struct Outcomes {
    name: String,
    detached: DetachedSyncs,
    fenced: ErrorLatch,
}

impl Outcomes {
    /// Makes the error of an operation. An error that reports fencing is stored for later
    /// operations.
    fn error(&self, what: &'static str, offset: Option<u64>, source: io::Error) -> Error {
        let error = Error::host(what, source).on(&self.name);
        let error = match offset {
            Some(offset) => error.at(offset),
            None => error,
        };
        if error.errno() == errno::ESHUTDOWN && self.fenced.get().is_none() {
            tracing::error!("{error}; every request fails from now on: {FENCED_HINT}");
            self.fenced.set(&error);
        }
        error
    }
}

/// An open image.
pub(super) struct Connection {
    outcomes: Arc<Outcomes>,
    /// `None` after the close.
    image: RwLock<Option<Arc<Image>>>,
    /// The eventfd of the completions.
    notifier: OwnedFd,
    /// The threads whose loops watch the eventfd.
    reapers: Mutex<Vec<ThreadId>>,
    /// Held by the thread of a blocking call, so that one call runs at a time.
    blocking: Arc<async_lock::Mutex<()>>,
}

impl Connection {
    /// The connection of an image that was just opened.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub(super) fn new(name: String, image: Image) -> Result<Arc<Self>> {
        let notifier = image.notifier();
        let notifier = notifier.map_err(|error| Error::host("cannot open", error).on(&name))?;
        let (detached, fenced) = (DetachedSyncs::default(), ErrorLatch::new(FENCED_HINT));
        Ok(Arc::new(Self {
            outcomes: Arc::new(Outcomes { name, detached, fenced }),
            image: RwLock::new(Some(Arc::new(image))),
            notifier,
            reapers: Mutex::default(),
            blocking: Arc::default(),
        }))
    }

    /// The location, for messages.
    pub(super) fn name(&self) -> &str {
        &self.outcomes.name
    }

    pub(super) fn detached(&self) -> &DetachedSyncs {
        &self.outcomes.detached
    }

    /// Makes the error of an operation. An error that reports fencing is stored for later
    /// operations.
    pub(super) fn error(
        &self,
        what: &'static str,
        offset: Option<u64>,
        source: io::Error,
    ) -> Error {
        self.outcomes.error(what, offset, source)
    }

    /// Carries out an operation; `what` names the operation in errors. `is_sync` says whether the
    /// operation makes data durable.
    ///
    /// # Panics
    /// Outside of an event loop.
    pub(super) async fn run(
        self: &Arc<Self>,
        what: &'static str,
        offset: Option<u64>,
        command: Command,
        is_sync: bool,
    ) -> Result<u64> {
        self.outcomes.fenced.check()?;
        self.watch()?;
        let slot = Arc::new(Slot::new(is_sync));
        let outcomes = Arc::clone(&self.outcomes);
        let waiter = Pending { outcomes, slot: Arc::clone(&slot), what, offset };
        // The lock is released before the wait.
        let begun = match &*self.image.read() {
            Some(image) => image.submit(command, waiter),
            None => return Err(self.closed()),
        };
        begun.map_err(|error| self.error(what, offset, error))?;
        InFlight { connection: self, slot }.await
    }

    /// Makes a blocking call on a thread of its own.
    pub(super) async fn run_blocking<T: Send + 'static>(
        &self,
        what: &'static str,
        call: impl FnOnce(&Image) -> io::Result<T> + Send + 'static,
    ) -> Result<T> {
        self.outcomes.fenced.check()?;
        let one = self.blocking.lock_arc().await;
        let image = self.image.read().clone();
        let image = image.ok_or_else(|| self.closed())?;
        let call = move || {
            let called = call(&image);
            // The next call may be the close, which needs the only reference.
            drop(image);
            drop(one);
            called
        };
        let called = run_blocking("blockhouse-rbd", call).await;
        called.flatten().map_err(|error| self.error(what, None, error))
    }

    /// Takes the image out. The caller closes it, which blocks. Later operations fail. `None` if
    /// the image was taken before, or if a blocking call with a dropped future still uses it: that
    /// call closes it.
    pub(super) fn take_image(&self) -> Option<Image> {
        let image = self.image.write().take();
        // The signal makes the watching tasks end.
        let _ = rustix::io::write(&self.notifier, &1_u64.to_ne_bytes());
        Arc::into_inner(image?)
    }

    /// Closes the image and releases its lock.
    ///
    /// # Errors
    /// Errors of the cluster; the image is closed nevertheless.
    pub(super) async fn close(&self) -> Result<()> {
        let one = self.blocking.lock_arc().await;
        let Some(image) = self.take_image() else { return Ok(()) };
        let close = move || {
            let closed = image.close();
            drop(one);
            closed
        };
        let closed = run_blocking("blockhouse-rbd", close).await;
        closed.flatten().map_err(|error| self.error("cannot close", None, error))
    }

    fn closed(&self) -> Error {
        Error::new(ErrorKind::Io, "the image was closed").on(self.name())
    }

    /// Makes the current thread's loop watch for completions.
    fn watch(self: &Arc<Self>) -> Result<()> {
        let thread = std::thread::current().id();
        if self.reapers.lock().contains(&thread) {
            return Ok(());
        }
        let failed = |error| Error::host("cannot watch for completions", error).on(self.name());
        let notifier = self.notifier.try_clone().map_err(failed)?;
        let watch = Watch::new(notifier, Rc::new(())).map_err(failed)?;
        self.reapers.lock().push(thread);
        let registration = Registration { connection: Arc::downgrade(self), thread };
        spawn_detached(reap_events(watch, registration));
        Ok(())
    }

    /// Completes the operations that librbd has completed. `false`: the image was closed.
    fn reap(&self) -> bool {
        let image = self.image.read();
        let Some(image) = &*image else { return false };
        image.reap();
        true
    }
}

/// Entry of a loop's thread in the list of watching threads. Removed when the watching task ends,
/// also if it ends with its loop.
struct Registration {
    connection: Weak<Connection>,
    thread: ThreadId,
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.upgrade() {
            connection.reapers.lock().retain(|thread| *thread != self.thread);
        }
    }
}

/// Completes operations until the image is closed.
async fn reap_events(watch: Watch, registration: Registration) {
    loop {
        watch.event().await;
        match registration.connection.upgrade() {
            Some(connection) if connection.reap() => {}
            _ => return,
        }
    }
}

/// The future of an operation in flight in librbd. If the future is dropped, the operation
/// continues, and its memory is kept until librbd has completed it.
struct InFlight<'a> {
    connection: &'a Connection,
    slot: Arc<Slot>,
}

impl Future for InFlight<'_> {
    type Output = Result<u64>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.slot.poll(context.waker())
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.slot.detach(self.connection.detached());
    }
}
