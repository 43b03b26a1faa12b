//! The three engines (io_uring, Linux AIO by epoll, threads) behind one trait, and their common
//! parts: operations in flight, open and registered files, registered buffers, watches of
//! descriptors.

pub(crate) mod adaptive_poll;
pub(crate) mod broken_wait;
pub(crate) mod byte_lock;
pub(crate) mod detached_syncs;
pub(crate) mod engine;
pub(crate) mod epoll;
pub(crate) mod file;
pub(crate) mod fixed_files;
pub(crate) mod io_poll;
pub(crate) mod linux_aio;
pub(crate) mod lone_writes;
pub(crate) mod loop_shared;
pub(crate) mod mailbox;
pub(crate) mod operation;
pub(crate) mod queued_flag;
pub(crate) mod registered_buffers;
pub(crate) mod registrations;
pub(crate) mod request_queue;
pub(crate) mod ring_restrictions;
pub(crate) mod ring_tables;
pub(crate) mod system_call;
pub(crate) mod thread_pool;
pub(crate) mod uring;
pub(crate) mod wait_queue;
pub(crate) mod watches;

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::driver::fixed_files::{FileId, FixedFiles};
use crate::driver::io_poll::IoPoll;
use crate::driver::operation::{Operation, OperationTable, Token};
use crate::driver::registrations::Registrations;
use crate::driver::watches::WatchKey;
use crate::mapping::Mapping;

/// Gets operations to the kernel and their results back, for one loop on one thread.
pub(crate) trait Driver {
    /// Carries out an operation inline, if this engine can do so without waiting. Returns the
    /// result as in [`Completion`].
    fn try_inline(&mut self, operation: &Operation) -> Option<i32>;

    /// Starts an operation. The caller neither moves nor changes it until a later `poll` has
    /// reported its result. The engine may defer the submission to the next `poll`, so that one
    /// system call submits many.
    fn start(&mut self, token: Token, operation: &Operation);

    /// Cancels an operation that may wait without bound (on a socket). Its result is still
    /// reported, `-ECANCELED` if it was cancelled.
    fn cancel(&mut self, token: Token, operation: &Operation);

    /// Whether `poll` may find an event. A loop that busy-polls calls it repeatedly. No event is
    /// missed; an engine that cannot know returns true.
    fn may_have_events(&mut self) -> bool;

    /// Makes a later `poll` report each time that the descriptor becomes readable, and once if it
    /// is readable already. The descriptor stays open until `unwatch`.
    fn watch(&mut self, key: WatchKey, descriptor: BorrowedFd<'_>) -> io::Result<()>;

    /// Ends a watch. Events that were found before may still be reported.
    fn unwatch(&mut self, key: WatchKey, descriptor: BorrowedFd<'_>);

    /// The next event of a watch that the last `poll` found.
    fn next_event(&mut self) -> Option<WatchKey>;

    /// Sets whether files get slots in the engine's own table from now on. No operation may be in
    /// flight.
    fn set_fixed_files(&mut self, fixed: FixedFiles);

    /// Empties the slot of a closed file, if the file has one.
    fn unregister_file(&mut self, file: &FileId);

    /// Sets whether completions on files are polled for from now on, where engine and file allow
    /// it. No operation is in flight.
    fn io_poll(&mut self, io_poll: IoPoll);

    /// Whether operations are in flight that only `poll` completes, without an interrupt. While
    /// there are any, `poll` does not sleep.
    fn is_polling(&self) -> bool;

    /// Puts memory into slots of the engine's own table, if it has such a table.
    ///
    /// # Errors
    /// The kernel's error; requests for memory without a slot still work.
    fn register_memory(&mut self, memory: &Registrations<Mapping>) -> io::Result<()>;

    /// Frees the slots of memory that is no longer used, if it has slots.
    fn unregister_memory(&mut self, mapping: &Mapping);

    /// Frees all slots of memory. No operation is in flight.
    fn unregister_all_memory(&mut self);

    /// Takes this many slots of the engine's own table for pages that the kernel registers there. A
    /// number identifies the table.
    ///
    /// # Errors
    /// `Unsupported` without such a table; `ENOSPC` if it lacks the slots; the kernel's error.
    fn reserve_slots(&mut self, _count: u16) -> io::Result<(usize, Vec<u16>)> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Gives such slots back. The kernel has no pages in them, or replaces these.
    fn release_slots(&mut self, _slots: Vec<u16>) {}

    /// Submits deferred operations, then sleeps as `wait` says until an event (a completion, a
    /// notification, the deadline), then appends all results to `done`. `operations` has all
    /// started operations.
    fn poll(&mut self, wait: Wait, operations: &OperationTable, done: &mut Vec<Completion>);

    /// Opens a file by the ring: its descriptor or a negative errno. `None` without a ring. For
    /// tests of its restrictions.
    #[cfg(debug_assertions)]
    fn attempt_open(&mut self) -> Option<i32> {
        None
    }
}

/// An operation's end: the kernel's result, a count of bytes or a negative errno.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Completion {
    pub(crate) token: Token,
    pub(crate) result: i32,
}

/// How long `poll` may sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// `poll` does not sleep, because there is other work.
    Never,
    /// `poll` sleeps until an event.
    Event,
    /// `poll` sleeps until an event, but at most for this time.
    AtMost(Duration),
}

impl Wait {
    /// The same, but not longer than `time`.
    pub(crate) fn not_longer(self, time: Duration) -> Self {
        match self {
            Self::Never => Self::Never,
            Self::Event => Self::AtMost(time),
            Self::AtMost(limit) => Self::AtMost(limit.min(time)),
        }
    }
}
