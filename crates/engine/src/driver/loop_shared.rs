//! The part of a loop that all threads share: the headers of its tasks, the ready queue, and the
//! mailbox.
//!
//! A waker knows its task's loop. On the loop's own thread it puts the task into the ready queue.
//! On any other thread it posts a message, and notifies the loop if it sleeps (guarantees: see
//! `mailbox`).

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Wake;

use rustix::event::EventfdFlags;

use crate::driver::fixed_files::FileId;
use crate::driver::mailbox::{self, Mailbox};
use crate::driver::operation::Token;
use crate::driver::queued_flag::QueuedFlag;
use crate::driver::registrations::Unregister;
use crate::mapping::Mapping;

thread_local! {
    static READY: RefCell<Option<Rc<Ready>>> = const { RefCell::new(None) };
}

/// A message of another thread to a loop.
pub(crate) enum LoopMessage {
    /// A task became ready.
    Ready(Arc<TaskHeader>),
    /// A function for the loop to run, which only spawns a task.
    Call(Box<dyn FnOnce() + Send>),
    /// A worker thread finished an operation.
    Completed(Token, i32),
    /// A file that has a slot in the loop's ring was closed.
    Closed(Arc<FileId>),
    /// Memory that has slots in the loop's ring is no longer used.
    Unused(Arc<Mapping>),
}

/// The part of a loop that other threads see.
pub(crate) struct LoopShared {
    pub(crate) mailbox: Mailbox<LoopMessage>,
    /// The eventfd that wakes the sleeping loop.
    notifier: OwnedFd,
}

impl LoopShared {
    pub(crate) fn new() -> io::Result<Arc<Self>> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let notifier = rustix::event::eventfd(0, flags)?;
        Ok(Arc::new(Self { mailbox: Mailbox::new(), notifier }))
    }

    /// Posts a message and wakes the loop if it sleeps.
    pub(crate) fn post(&self, message: LoopMessage) {
        if self.mailbox.post(message) == mailbox::Wake::Needed {
            // The write fails only if the counter is full: after 2^64 - 2 writes, as no engine
            // reads it.
            let _ = rustix::io::write(&self.notifier, &1u64.to_ne_bytes());
        }
    }

    /// The descriptor that the engine watches while the loop sleeps.
    pub(crate) fn notifier(&self) -> BorrowedFd<'_> {
        self.notifier.as_fd()
    }
}

impl Unregister<FileId> for LoopShared {
    fn unregister(&self, id: Arc<FileId>) {
        self.post(LoopMessage::Closed(id));
    }
}

impl Unregister<Mapping> for LoopShared {
    fn unregister(&self, mapping: Arc<Mapping>) {
        self.post(LoopMessage::Unused(mapping));
    }
}

/// The target of a waker. Shared with any thread; the future itself never leaves its loop.
pub(crate) struct TaskHeader {
    /// The index of the future in the loop's table, or `MAIN`.
    pub(crate) index: usize,
    /// Whether the task is in the ready queue, or on its way there: it is queued only once.
    pub(crate) queued: QueuedFlag,
    shared: Arc<LoopShared>,
}

/// The index of the future that `block_on` runs, which lives outside the table.
pub(crate) const MAIN: usize = usize::MAX;

impl Wake for TaskHeader {
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

impl TaskHeader {
    pub(crate) fn new(index: usize, queued: QueuedFlag, shared: &Arc<LoopShared>) -> Arc<Self> {
        Arc::new(Self { index, queued, shared: Arc::clone(shared) })
    }

    /// Puts the task into its loop's ready queue, from any thread.
    fn queue(self: Arc<Self>) {
        let mut header = Some(self);
        Ready::of_this_thread(|ready| {
            if let Some(header) =
                header.take_if(|header| Arc::ptr_eq(&ready.shared, &header.shared))
            {
                ready.push(header);
            }
        });
        if let Some(header) = header {
            let shared = Arc::clone(&header.shared);
            shared.post(LoopMessage::Ready(header));
        }
    }
}

/// The tasks of a loop to be polled.
pub(crate) struct Ready {
    shared: Arc<LoopShared>,
    queue: RefCell<VecDeque<Arc<TaskHeader>>>,
    main: Cell<bool>,
}

impl Ready {
    pub(crate) fn new(shared: &Arc<LoopShared>) -> Rc<Self> {
        let shared = Arc::clone(shared);
        Rc::new(Self { shared, queue: RefCell::default(), main: Cell::new(false) })
    }

    /// Makes this the queue of the current thread, or leaves the thread without one.
    pub(crate) fn set_for_this_thread(ready: Option<&Rc<Self>>) {
        READY.set(ready.cloned());
    }

    /// Runs `f` with the queue of the current thread, if a loop runs on it.
    fn of_this_thread(f: impl FnOnce(&Self)) {
        // The thread may be ending, and its storage destroyed: then no loop runs on it.
        let _ = READY.try_with(|ready| ready.borrow().as_deref().map(f));
    }

    /// Queues a task for the next iteration.
    pub(crate) fn push(&self, header: Arc<TaskHeader>) {
        if header.index == MAIN {
            header.queued.clear();
            self.main.set(true);
        } else {
            self.queue.borrow_mut().push_back(header);
        }
    }

    /// The next task in line.
    pub(crate) fn pop(&self) -> Option<Arc<TaskHeader>> {
        self.queue.borrow_mut().pop_front()
    }

    /// Keeps the tasks for which `keep` returns true.
    pub(crate) fn retain(&self, keep: impl FnMut(&Arc<TaskHeader>) -> bool) {
        self.queue.borrow_mut().retain(keep);
    }

    /// How many tasks are in line.
    pub(crate) fn len(&self) -> usize {
        self.queue.borrow().len()
    }

    /// Whether there is nothing to poll.
    pub(crate) fn is_empty(&self) -> bool {
        !self.main.get() && self.queue.borrow().is_empty()
    }

    /// Makes the loop poll the main future.
    pub(crate) fn set_main(&self) {
        self.main.set(true);
    }

    /// Removes the mark that the main future is ready to be polled; returns whether it was set.
    pub(crate) fn take_main(&self) -> bool {
        self.main.take()
    }

    /// Removes all tasks, and the mark of the main future.
    pub(crate) fn clear(&self) {
        self.queue.borrow_mut().clear();
        self.main.set(false);
    }
}
