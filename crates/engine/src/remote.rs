//! How a loop is reached: the addresses of its tasks, what is ready, and its mailbox.
//!
//! A waker knows its task's loop. On the loop's own thread it puts the task into the ready queue; on
//! any other it leaves a note, and rings if the loop sleeps (see `mailbox` for that promise).

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::task::Wake;

use rustix::event::EventfdFlags;

use crate::fixed::Number;
use crate::mailbox::{Bell, Mailbox};
use crate::mapping::Mapping;
use crate::membership::Holder;
use crate::operation::Token;
use crate::queued::Queued;

thread_local! {
    static READY: RefCell<Option<Rc<Ready>>> = const { RefCell::new(None) };
}

/// What other threads tell a loop.
pub(crate) enum Note {
    /// A task became ready.
    Ready(Arc<Header>),
    /// Run this; it does nothing but spawn a task.
    Call(Box<dyn FnOnce() + Send>),
    /// A worker thread finished an operation.
    Completed(Token, i32),
    /// A file that has a slot in the loop's ring was closed.
    Closed(Arc<Number>),
    /// Nobody uses this memory any more, which has slots in the loop's ring.
    Unused(Arc<Mapping>),
}

/// The part of a loop that other threads see.
pub(crate) struct Remote {
    pub(crate) mailbox: Mailbox<Note>,
    /// An eventfd: what wakes the sleeping loop.
    bell: OwnedFd,
}

impl Remote {
    pub(crate) fn new() -> io::Result<Arc<Self>> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let bell = rustix::event::eventfd(0, flags)?;
        Ok(Arc::new(Self { mailbox: Mailbox::new(), bell }))
    }

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

impl Holder<Number> for Remote {
    fn released(&self, number: Arc<Number>) {
        self.post(Note::Closed(number));
    }
}

impl Holder<Mapping> for Remote {
    fn released(&self, mapping: Arc<Mapping>) {
        self.post(Note::Unused(mapping));
    }
}

/// What a waker points to. Shared with any thread; the future itself never leaves its loop.
pub(crate) struct Header {
    /// The place of the future in the loop's table, or `MAIN`.
    pub(crate) index: usize,
    /// Whether it is in the ready queue (or on its way there), so that it gets there once.
    pub(crate) queued: Queued,
    remote: Arc<Remote>,
}

/// The index of the future that `block_on` runs, which lives outside the table.
pub(crate) const MAIN: usize = usize::MAX;

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
    pub(crate) fn new(index: usize, queued: Queued, remote: &Arc<Remote>) -> Arc<Self> {
        Arc::new(Self { index, queued, remote: Arc::clone(remote) })
    }

    /// Puts the task into its loop's ready queue, from whatever thread.
    fn queue(self: Arc<Self>) {
        let mut header = Some(self);
        Ready::of_this_thread(|ready| {
            if let Some(header) =
                header.take_if(|header| Arc::ptr_eq(&ready.remote, &header.remote))
            {
                ready.push(header);
            }
        });
        if let Some(header) = header {
            let remote = Arc::clone(&header.remote);
            remote.post(Note::Ready(header));
        }
    }
}

/// The tasks of a loop that are to be polled.
pub(crate) struct Ready {
    remote: Arc<Remote>,
    queue: RefCell<VecDeque<Arc<Header>>>,
    main: Cell<bool>,
}

impl Ready {
    pub(crate) fn new(remote: &Arc<Remote>) -> Rc<Self> {
        let remote = Arc::clone(remote);
        Rc::new(Self { remote, queue: RefCell::default(), main: Cell::new(false) })
    }

    /// Makes this the queue of the current thread, or leaves the thread without one.
    pub(crate) fn set_for_this_thread(ready: Option<&Rc<Self>>) {
        READY.set(ready.cloned());
    }

    /// Runs `f` with the queue of the current thread, if a loop runs on it.
    fn of_this_thread(f: impl FnOnce(&Self)) {
        // The thread may be ending, its storage gone: then no loop runs on it.
        let _ = READY.try_with(|ready| ready.borrow().as_deref().map(f));
    }

    /// Queues a task for the next round.
    pub(crate) fn push(&self, header: Arc<Header>) {
        if header.index == MAIN {
            header.queued.clear();
            self.main.set(true);
        } else {
            self.queue.borrow_mut().push_back(header);
        }
    }

    /// The next task in line.
    pub(crate) fn pop(&self) -> Option<Arc<Header>> {
        self.queue.borrow_mut().pop_front()
    }

    /// Keeps those tasks of which `keep` says so.
    pub(crate) fn retain(&self, keep: impl FnMut(&Arc<Header>) -> bool) {
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

    /// Has the main future polled.
    pub(crate) fn set_main(&self) {
        self.main.set(true);
    }

    /// Whether the main future is to be polled; not any more after this.
    pub(crate) fn take_main(&self) -> bool {
        self.main.take()
    }

    /// Forgets everything.
    pub(crate) fn clear(&self) {
        self.queue.borrow_mut().clear();
        self.main.set(false);
    }
}
