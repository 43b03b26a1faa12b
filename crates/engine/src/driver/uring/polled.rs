//! The second ring of a loop, for reads and writes whose completions are polled for, without
//! interrupts (`IORING_SETUP_IOPOLL`).
//!
//! Such a ring accepts only direct I/O on devices with poll queues, and finds completions only when
//! it is entered. So a loop with operations in flight here does not sleep, but enters the ring in
//! every iteration; without any it does not enter the ring. The ring is created on request, because
//! a process in a sandbox cannot create one later.
//!
//! Guarantees: an operation that the kernel refuses to poll for is returned for the main ring, with
//! one warning for its file. If this ring cannot be created, the main ring does every operation.

use std::sync::Arc;

use io_uring::squeue;

use super::entry;
use super::ring::{CompletionMode, Ring};
use crate::driver::Completion;
use crate::driver::fixed_files::{FileId, FixedFiles};
use crate::driver::io_poll::IoPoll;
use crate::driver::loop_shared::LoopShared;
use crate::driver::operation::{Operation, OperationTable, Token, Transfer, WriteThrough};
use crate::driver::ring_restrictions::DeviceCommands;

pub(super) struct PolledRing {
    shared: Arc<LoopShared>,
    fixed: FixedFiles,
    state: State,
    /// The number of operations in the kernel.
    in_flight: usize,
    /// Completed operations, which the next `poll` reports.
    ready: Vec<Completion>,
}

enum State {
    /// The ring was not requested, or the kernel refused it.
    Off,
    Open(Box<Ring>),
}

impl PolledRing {
    /// A value without a ring, which was not requested yet.
    pub(super) fn new(shared: &Arc<LoopShared>) -> Self {
        let (shared, fixed) = (Arc::clone(shared), FixedFiles::Off);
        Self { shared, fixed, state: State::Off, in_flight: 0, ready: Vec::new() }
    }

    /// Creates or drops the ring. No operation may be in flight.
    pub(super) fn set(&mut self, io_poll: IoPoll) {
        self.state = match io_poll {
            IoPoll::On => self.open(),
            IoPoll::Off => State::Off,
        };
    }

    /// Sets whether files get slots in this ring, too. No operation may be in flight.
    pub(super) fn set_fixed_files(&mut self, fixed: FixedFiles) {
        self.fixed = fixed;
        if let State::Open(ring) = &mut self.state {
            ring.set_fixed_files(fixed);
        }
    }

    /// Releases the slot of a closed file, if any.
    pub(super) fn unregister_file(&mut self, file: &FileId) {
        if let State::Open(ring) = &mut self.state {
            ring.unregister_file(file);
        }
    }

    /// Whether the ring must be polled for something to complete.
    pub(super) fn is_busy(&self) -> bool {
        self.in_flight > 0 || !self.ready.is_empty()
    }

    /// Starts the operation, as [`Driver::start`] does, if it can be polled for. Returns whether it
    /// was started.
    ///
    /// [`Driver::start`]: crate::driver::Driver::start
    pub(super) fn start(&mut self, token: Token, operation: &Operation) -> bool {
        let Some(transfer) = pollable(operation) else { return false };
        let State::Open(ring) = &mut self.state else { return false };
        let entry = ring.on_file(&transfer.file, |file| match operation {
            // Memory is registered with the main ring alone.
            Operation::Write(_, through) => entry::write(file, transfer, None, through.flags()),
            _ => entry::read(file, transfer, None),
        });
        self.push(&entry.user_data(token.as_u64()));
        self.in_flight += 1;
        true
    }

    fn open(&self) -> State {
        match Ring::open(&self.shared, CompletionMode::Polled, DeviceCommands::Refused) {
            Ok(mut ring) => {
                ring.set_fixed_files(self.fixed);
                State::Open(Box::new(ring))
            }
            Err(error) => {
                tracing::warn!("interrupts announce completions: no ring for polling: {error}");
                State::Off
            }
        }
    }

    fn push(&mut self, entry: &squeue::Entry) {
        while let State::Open(ring) = &mut self.state
            && ring.push(entry).is_err()
        {
            self.enter();
        }
    }

    /// Submits everything and polls the devices' queues once.
    fn enter(&mut self) {
        let State::Open(ring) = &mut self.state else { return };
        ring.enter(0, None);
        let before = self.ready.len();
        self.ready.extend(ring.completions().map(|entry| Completion {
            token: Token::from_u64(entry.user_data()),
            result: entry.result(),
        }));
        self.in_flight -= self.ready.len() - before;
    }

    /// Submits everything, fetches completions without waiting, and appends them to `done`. Returns
    /// the operations that the kernel does not poll for: the caller starts them elsewhere.
    #[must_use]
    pub(super) fn poll(
        &mut self,
        operations: &OperationTable,
        done: &mut Vec<Completion>,
    ) -> Vec<Token> {
        let mut refused = Vec::new();
        if self.in_flight > 0 {
            self.enter();
        }
        for completion in self.ready.drain(..) {
            if completion.result == -libc::EOPNOTSUPP {
                note_refusal(operations.operation(completion.token));
                refused.push(completion.token);
            } else {
                done.push(completion);
            }
        }
        refused
    }
}

/// The transfer of an operation that can be polled for.
fn pollable(operation: &Operation) -> Option<&Transfer> {
    let (transfer, can_be) = match operation {
        Operation::Read(transfer) => (transfer, transfer.file.pollable.reads()),
        Operation::Write(transfer, WriteThrough::No) => {
            (transfer, transfer.file.pollable.plain_writes())
        }
        Operation::Write(transfer, WriteThrough::Yes) => {
            (transfer, transfer.file.pollable.durable_writes())
        }
        _ => return None,
    };
    can_be.then_some(transfer)
}

/// Stops polling for the operation's file, and logs that once.
fn note_refusal(operation: &Operation) {
    let (Operation::Read(transfer) | Operation::Write(transfer, _)) = operation else { return };
    if transfer.file.pollable.refuse() {
        let name = transfer.file.path();
        tracing::warn!(
            "{name}: interrupts announce completions: the kernel does not poll for them"
        );
    }
}
