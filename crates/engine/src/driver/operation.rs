//! The operations that a loop submits to the kernel, and the table of those in flight.
//!
//! This file upholds invariant 3 (ARCHITECTURE.md). An [`Operation`] stays in the table, unmoved,
//! from its submission to an engine until its completion. The table also keeps everything that the
//! kernel accesses: the memory, the list of its segments, the file descriptor. That holds even if
//! the operation's future or the loop is dropped.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::task::Waker;

use blockhouse_core::{ByteRange, IoVector, IoVectorList, SyncMode};

use crate::driver::detached_syncs::DetachedSyncs;
use crate::driver::file::File;
use crate::driver::wait_queue::{Ticket, WaitQueue};

/// The maximum number of operations in flight per loop. Further ones wait for a free slot.
pub(crate) const MAX_OPERATIONS: usize = 2048;

/// One operation, and everything that it needs until it completes.
pub(crate) enum Operation {
    Read(Transfer),
    Write(Transfer, WriteThrough),
    Sync {
        file: Arc<File>,
        sync: SyncMode,
    },
    /// `fallocate(2)` with `mode`. The operation owns the guards of `held` until it completes.
    Allocate {
        file: Arc<File>,
        mode: i32,
        range: ByteRange,
        held: Option<IoVector>,
    },
    Receive(Message),
    Send(Message),
    /// `accept4(2)`; the result is the new descriptor.
    Accept {
        socket: Arc<OwnedFd>,
    },
    /// `IORING_OP_URING_CMD`. Only a ring that was created for device commands accepts it.
    Command(DeviceCommand),
}

impl Operation {
    /// Whether the operation waits for a peer. Such an operation may take any time to complete, and
    /// can be cancelled.
    pub(crate) fn is_on_socket(&self) -> bool {
        matches!(self, Self::Receive(_) | Self::Send(_) | Self::Accept { .. })
    }

    /// Whether the operation may take any time to complete, because it waits for a peer or a
    /// driver.
    pub(crate) fn waits_for_others(&self) -> bool {
        self.is_on_socket() || matches!(self, Self::Command(_))
    }

    /// The descriptor, and a number below 8 for the kind of operation.
    pub(crate) fn identity(&self) -> (RawFd, usize) {
        match self {
            Self::Read(transfer) => (transfer.file.raw(), 0),
            Self::Write(transfer, WriteThrough::No) => (transfer.file.raw(), 1),
            Self::Write(transfer, WriteThrough::Yes) => (transfer.file.raw(), 2),
            Self::Sync { file, .. } => (file.raw(), 3),
            Self::Allocate { file, .. } => (file.raw(), 4),
            Self::Receive(message) => (message.socket.as_raw_fd(), 5),
            Self::Send(message) => (message.socket.as_raw_fd(), 6),
            // Same number as `Receive`: their descriptors differ, so they share no estimate.
            Self::Command(command) => (command.file.as_raw_fd(), 5),
            Self::Accept { socket } => (socket.as_raw_fd(), 7),
        }
    }

    /// The record for the outcome if the future is dropped. Reason: the outcome may be the only
    /// report of a failure.
    fn detached_syncs(&self) -> Option<&DetachedSyncs> {
        match self {
            Self::Sync { file, .. } => Some(&file.detached_syncs),
            Self::Write(transfer, WriteThrough::Yes) => Some(&transfer.file.detached_syncs),
            _ => None,
        }
    }

    /// Handles the result of a detached operation, which has no waiting future.
    pub(crate) fn discard_result(self, result: i32) {
        if let Some(syncs) = self.detached_syncs() {
            let is_refused =
                result < 0 && matches!(self, Self::Write(..)) && is_fua_refusal(-result);
            syncs.complete(if is_refused { 0 } else { result });
        }
        if let (Self::Accept { .. }, 0..) = (self, result) {
            // SAFETY: the kernel has just made this descriptor for us, and this is its only owner.
            drop(unsafe { OwnedFd::from_raw_fd(result) });
        }
    }
}

/// A transfer between memory and a file.
pub(crate) struct Transfer {
    pub(crate) file: Arc<File>,
    pub(crate) offset: u64,
    pub(crate) vector: IoVector,
}

/// Whether the kernel fails a write with this errno if it does not support `RWF_DSYNC`. Such a
/// write wrote nothing, and no earlier write is lost.
pub(crate) fn is_fua_refusal(errno: i32) -> bool {
    matches!(errno, libc::EOPNOTSUPP | libc::EINVAL | libc::ENOSYS)
}

/// Whether a write is durable when it completes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum WriteThrough {
    No,
    /// `RWF_DSYNC`.
    Yes,
}

impl WriteThrough {
    pub(crate) fn flags(self) -> i32 {
        match self {
            Self::No => 0,
            Self::Yes => libc::RWF_DSYNC,
        }
    }
}

/// A command to a device's driver. The driver completes the command when the device has an event.
/// The ring cannot cancel the command; only another command to the device ends it.
pub(crate) struct DeviceCommand {
    pub(crate) file: Arc<OwnedFd>,
    pub(crate) code: u32,
    /// The bytes that the driver reads, before the address of `memory`.
    pub(crate) argument: [u8; 8],
    pub(crate) data: CommandData,
}

/// Where the data of a command to a device is.
pub(crate) enum CommandData {
    /// One segment, which the driver may read and write until the command completes.
    Memory(IoVector),
    /// In pages that the driver registers with the ring, as this address of the entry says.
    Pages(u64),
}

/// A transfer between memory and a socket.
pub(crate) struct Message {
    pub(crate) socket: Arc<OwnedFd>,
    pub(crate) list: IoVectorList,
}

/// The maximum number of segments of one socket operation (`IOV_MAX`, POSIX `<limits.h>`).
const MAX_SEGMENTS: usize = 1024;

impl Message {
    /// A header for the kernel that points to the segments.
    pub(crate) fn header(&self) -> libc::msghdr {
        let segments = self.list.segments();
        // SAFETY: all-zero is a valid msghdr (null pointers and zero lengths).
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        // A Segment is laid out as an iovec; the kernel only reads the array.
        header.msg_iov = segments.as_ptr().cast_mut().cast();
        header.msg_iovlen = segments.len().min(MAX_SEGMENTS);
        header
    }
}

/// The index of a slot in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Token(u32);

impl Token {
    pub(crate) fn as_u64(self) -> u64 {
        u64::from(self.0)
    }

    /// The token from its `as_u64` value.
    pub(crate) fn from_u64(value: u64) -> Self {
        Self(u32::try_from(value).expect("a completion for an operation of this table"))
    }

    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// A slot for one operation. The operation is never moved between `insert` and its completion:
/// the kernel may hold addresses into it.
struct Slot {
    operation: Option<Operation>,
    state: State,
}

enum State {
    Free,
    /// The kernel has the operation, and a future waits for it.
    InFlight(Waker),
    /// The kernel has the operation, and its future was dropped.
    Detached,
    /// The operation is complete, and its result was not fetched yet.
    Done(i32),
}

/// All operations in flight.
///
/// The methods run no foreign code except the cloning and dropping of wakers. They return wakers to
/// call and values to drop, so the caller does this when the table is no longer borrowed.
pub(crate) struct OperationTable {
    slots: Box<[Slot]>,
    free: Vec<u32>,
    /// The tasks that wait for a free slot. While any task waits, every free slot is reserved for a
    /// woken task.
    waiting: WaitQueue,
}

impl OperationTable {
    pub(crate) fn new() -> Self {
        let slot = || Slot { operation: None, state: State::Free };
        Self {
            slots: (0..MAX_OPERATIONS).map(|_| slot()).collect(),
            free: (0..MAX_OPERATIONS as u32).rev().collect(),
            waiting: WaitQueue::default(),
        }
    }

    /// Moves the operation from `operation` to a free slot. Without one, returns a ticket: `waiter`
    /// is woken, and its task calls this again with the ticket.
    pub(crate) fn insert(
        &mut self,
        operation: &mut Option<Operation>,
        ticket: Option<Ticket>,
        waiter: &Waker,
    ) -> Result<Token, Ticket> {
        match ticket {
            Some(ticket) if !self.waiting.try_acquire(ticket, waiter) => return Err(ticket),
            None if self.free.len() == self.waiting.reserved() => {
                return Err(self.waiting.enqueue(waiter));
            }
            _ => {}
        }
        let index = self.free.pop().expect("a slot that is free, or was reserved for this ticket");
        let slot = &mut self.slots[index as usize];
        slot.operation = operation.take();
        slot.state = State::InFlight(waiter.clone());
        Ok(Token(index))
    }

    /// Cancels a wait for a slot. Returns the waker of the task that gets the slot instead.
    #[must_use]
    pub(crate) fn cancel_wait(&mut self, ticket: Ticket) -> Option<Waker> {
        self.waiting.cancel(ticket)
    }

    /// The operation in a slot that is not free.
    pub(crate) fn operation(&self, token: Token) -> &Operation {
        self.slots[token.index()]
            .operation
            .as_ref()
            .expect("a token does not outlive its operation")
    }

    /// The kernel has completed the operation. Returns the waker to call. `None`: the operation is
    /// detached, and the caller releases it and discards its result.
    #[must_use]
    pub(crate) fn complete(&mut self, token: Token, result: i32) -> Option<Waker> {
        let state = &mut self.slots[token.index()].state;
        match std::mem::replace(state, State::Done(result)) {
            State::InFlight(waiter) => Some(waiter),
            State::Detached => None,
            State::Free | State::Done(_) => unreachable!("an operation completes once"),
        }
    }

    /// The result, if the operation is complete; the caller then releases it. Otherwise `waiter` is
    /// woken on completion.
    pub(crate) fn result(&mut self, token: Token, waiter: &Waker) -> Option<i32> {
        match &mut self.slots[token.index()].state {
            State::InFlight(old) => {
                old.clone_from(waiter);
                None
            }
            State::Done(result) => Some(*result),
            State::Free | State::Detached => unreachable!("only a future that waits asks"),
        }
    }

    /// The future was dropped. Returns the result if the operation is complete: the caller then
    /// releases the operation and discards its result.
    pub(crate) fn detach(&mut self, token: Token) -> Option<i32> {
        if let Some(syncs) = self.operation(token).detached_syncs() {
            syncs.detach();
        }
        let state = &mut self.slots[token.index()].state;
        match state {
            State::InFlight(_) => {
                *state = State::Detached;
                None
            }
            State::Done(result) => Some(*result),
            State::Free | State::Detached => unreachable!("an operation is detached once"),
        }
    }

    /// Takes out a completed operation. Returns the waker of the task that gets its slot.
    pub(crate) fn release(&mut self, token: Token) -> (Operation, Option<Waker>) {
        let slot = &mut self.slots[token.index()];
        let state = std::mem::replace(&mut slot.state, State::Free);
        debug_assert!(matches!(state, State::Done(_)), "the kernel has given it back");
        let operation = slot.operation.take().expect("a slot in use holds an operation");
        self.free.push(token.0);
        (operation, self.waiting.wake_next())
    }

    /// Whether the kernel has the operation in this slot.
    pub(crate) fn is_in_flight(&self, token: Token) -> bool {
        matches!(self.slots[token.index()].state, State::InFlight(_) | State::Detached)
    }

    /// The operations that the kernel has.
    pub(crate) fn in_flight(&self) -> impl Iterator<Item = Token> {
        let runs = |slot: &Slot| matches!(slot.state, State::InFlight(_) | State::Detached);
        (0..).zip(&self.slots).filter(move |(_, slot)| runs(slot)).map(|(index, _)| Token(index))
    }
}

impl Drop for OperationTable {
    /// Leaks operations that are in flight: memory that the kernel may still write to must never be
    /// freed. A loop that ends waits for its operations. So only commands to a device that was not
    /// stopped are in flight here, or any operations if the loop panicked.
    fn drop(&mut self) {
        if self.in_flight().next().is_some() {
            std::mem::forget(std::mem::take(&mut self.slots));
        }
    }
}
