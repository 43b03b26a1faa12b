//! The one trait behind which the three engines stand.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use crate::fixed::{FixedFiles, Number};
use crate::io_poll::IoPoll;
use crate::mapping::Mapping;
use crate::membership::Membership;
use crate::operation::{Operation, OperationTable, Token};
use crate::watches::WatchKey;

/// Gets operations to the kernel and their results back, for one loop on one thread.
pub(crate) trait Driver {
    /// Does an operation on the spot, if that is this engine's way and can be done without waiting.
    /// The answer is the result as in [`Completion`].
    fn attempt(&mut self, operation: &Operation) -> Option<i32>;

    /// Starts an operation. It stays where it is, unmoved and unchanged by the caller, until its
    /// result was reported by a later `turn`. The engine may put off the actual submission to the
    /// next `turn`, so that many go down at once.
    fn start(&mut self, token: Token, operation: &Operation);

    /// Asks for an operation that may wait without bound (on a socket) to be given up. Its result is
    /// reported all the same, `-ECANCELED` if it was.
    fn cancel(&mut self, token: Token, operation: &Operation);

    /// Whether a turn may find something: what a loop asks again and again that looks out for events
    /// instead of sleeping. No event is missed; an engine that cannot tell says yes.
    fn may_have_events(&mut self) -> bool;

    /// Has each time that the descriptor becomes readable reported by a later `turn`, and once if it
    /// is readable already. It stays open until `unwatch`.
    fn watch(&mut self, key: WatchKey, descriptor: BorrowedFd<'_>) -> io::Result<()>;

    /// Ends a watch. Events of it that are on their way may still be reported.
    fn unwatch(&mut self, key: WatchKey, descriptor: BorrowedFd<'_>);

    /// The next event of a watch that the last `turn` found.
    fn next_event(&mut self) -> Option<WatchKey>;

    /// Whether files get slots in the engine's own table, from now on. No operation is under way.
    fn fix_files(&mut self, fixed: FixedFiles);

    /// A file that may have a slot is closed: the slot is free.
    fn forget_file(&mut self, number: &Number);

    /// Whether completions on files are polled for, where engine and file allow it, from now on. No
    /// operation is under way.
    fn io_poll(&mut self, io_poll: IoPoll);

    /// Whether operations are under way that only a turn completes, and nothing announces: until they
    /// are over, no turn sleeps.
    fn is_polling(&self) -> bool;

    /// Puts memory into slots of the engine's own table, if it has such a table.
    ///
    /// # Errors
    /// The kernel's; requests for what has no slot are carried out all the same.
    fn register_memory(&mut self, memory: &Membership<Mapping>) -> io::Result<()>;

    /// Nobody uses this memory any more, which may have slots: they are free.
    fn forget_memory(&mut self, mapping: &Mapping);

    /// Gives back all slots of memory. No operation is under way.
    fn forget_all_memory(&mut self);

    /// Submits what waits for submission, then sleeps as `rest` says until something happens (a
    /// completion, the bell, the deadline), then appends all results to `done`. `operations` holds
    /// everything that was started.
    fn turn(&mut self, rest: Rest, operations: &OperationTable, done: &mut Vec<Completion>);
}

/// An operation's end: the kernel's answer, a count of bytes or a negative errno.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Completion {
    pub(crate) token: Token,
    pub(crate) result: i32,
}

/// How long a turn may sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rest {
    /// Not at all: there is other work.
    Never,
    /// Until something happens.
    UntilEvent,
    /// Until something happens or the time has come.
    UntilEventOr(Instant),
}

impl Rest {
    /// The same, but not beyond `time`.
    pub(crate) fn at_most(self, time: Instant) -> Self {
        match self {
            Self::Never => Self::Never,
            Self::UntilEvent => Self::UntilEventOr(time),
            Self::UntilEventOr(due) => Self::UntilEventOr(due.min(time)),
        }
    }
}
