//! The io_uring engine: files, sockets and the notifier of a loop through one ring, with one system
//! call for each iteration. Operations whose completions are polled for use a second ring
//! (`polled`). While any of them is in flight, the loop does not sleep.
//!
//! Guarantees: a thread carries out a file operation that the ring refused, so a lack of memory or
//! processes fails no request (`unstarted`). An operation ends only with its completion: a ring
//! that lost completions ends the process (`ring`).

mod entry;
mod polled;
mod ring;
mod unstarted;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::ptr;
use std::sync::Arc;

use blockhouse_core::SyncMode;
use io_uring::types::{Fd, FsyncFlags};
use io_uring::{cqueue, opcode, squeue};

use crate::driver::fixed_files::{FileId, FixedFiles};
use crate::driver::io_poll::IoPoll;
use crate::driver::loop_shared::LoopShared;
use crate::driver::operation::{MAX_OPERATIONS, Message, Operation, OperationTable, Token};
use crate::driver::registrations::Registrations;
use crate::driver::ring_restrictions::DeviceCommands;
use crate::driver::system_call::run_inline;
use crate::driver::watches::WatchKey;
use crate::driver::{Completion, Driver, Wait};
use crate::mapping::Mapping;
use polled::PolledRing;
use ring::{CompletionMode, Ring};

/// User data of completions that belong to no operation of the table.
const NOTIFIER: u64 = u64::MAX;
const CANCEL: u64 = u64::MAX - 1;
/// An attempt to open a file (`attempts`).
#[cfg(debug_assertions)]
const ATTEMPT: u64 = u64::MAX - 2;
/// This bit is set in the user data of watches. The bits below it are the key.
const WATCH: u64 = 1 << 32;

pub(crate) struct Uring {
    ring: Ring,
    polled: PolledRing,
    shared: Arc<LoopShared>,
    /// Whether the ring watches the notifier.
    watches_notifier: bool,
    /// Completions that were fetched already; the next `poll` reports them.
    ready: Vec<Completion>,
    /// Whether entries were reaped before the next `poll`, which then does not sleep: there may
    /// have been a completion, an event of a watch, or an event or the end of the notifier's watch.
    has_reaped: bool,
    /// The message headers of socket operations, by token. The kernel reads and writes them here.
    headers: Box<[libc::msghdr]>,
    /// The watched descriptors.
    watches: HashMap<WatchKey, RawFd>,
    /// Events of watches that were not reported yet.
    events: Vec<WatchKey>,
    /// Watches that the kernel has ended, to be renewed.
    ended: Vec<WatchKey>,
    /// Whether it was logged that threads carry out operations of the ring.
    has_reported_unstarted: bool,
    /// The outcome of an attempt to open a file.
    #[cfg(debug_assertions)]
    attempted: Option<i32>,
}

impl Uring {
    /// Opens a ring for the calling thread. `commands` says whether it refuses commands to devices.
    ///
    /// # Errors
    /// The kernel's error if io_uring is missing, forbidden or too old.
    pub(crate) fn open(shared: &Arc<LoopShared>, commands: DeviceCommands) -> io::Result<Self> {
        let ring = Ring::open(shared, CompletionMode::Interrupt, commands)?;
        // SAFETY: all-zero is a valid msghdr (null pointers and zero lengths).
        let no_header: libc::msghdr = unsafe { std::mem::zeroed() };
        let headers = vec![no_header; MAX_OPERATIONS].into_boxed_slice();
        let (shared, ready) = (Arc::clone(shared), Vec::new());
        Ok(Self {
            ring,
            polled: PolledRing::new(&shared),
            shared,
            watches_notifier: false,
            ready,
            has_reaped: false,
            headers,
            watches: HashMap::new(),
            events: Vec::new(),
            ended: Vec::new(),
            has_reported_unstarted: false,
            #[cfg(debug_assertions)]
            attempted: None,
        })
    }

    fn push(&mut self, entry: &squeue::Entry) {
        while self.ring.push(entry).is_err() {
            self.ring.enter(0, None);
            // The kernel may have refused because its completion queue is full.
            self.reap_early();
        }
    }

    /// Reaps before `poll`, which reports the results.
    fn reap_early(&mut self) {
        let mut ready = std::mem::take(&mut self.ready);
        self.reap(&mut ready);
        self.ready = ready;
        self.has_reaped = true;
    }

    /// The entry for an operation. It points into the operation, or to its header.
    fn entry_of(&mut self, token: Token, operation: &Operation) -> squeue::Entry {
        match operation {
            Operation::Read(transfer) if let Some(slot) = self.ring.slot_of_pages(transfer) => {
                self.ring.on_file(&transfer.file, |file| entry::read_to_pages(file, transfer, slot))
            }
            Operation::Read(transfer) => {
                let slot = self.ring.slot_of(&transfer.vector);
                self.ring.on_file(&transfer.file, |file| entry::read(file, transfer, slot))
            }
            Operation::Write(transfer, through)
                if let Some(slot) = self.ring.slot_of_pages(transfer) =>
            {
                let flags = through.flags();
                let entry = |file| entry::write_from_pages(file, transfer, slot, flags);
                self.ring.on_file(&transfer.file, entry)
            }
            Operation::Write(transfer, through) => {
                let (slot, flags) = (self.ring.slot_of(&transfer.vector), through.flags());
                self.ring.on_file(&transfer.file, |file| entry::write(file, transfer, slot, flags))
            }
            Operation::Sync { file, sync } => {
                let flags = match sync {
                    SyncMode::Data => FsyncFlags::DATASYNC,
                    SyncMode::Full => FsyncFlags::empty(),
                };
                self.ring.on_file(file, |file| opcode::Fsync::new(file).flags(flags).build())
            }
            Operation::Allocate { file, mode, range, .. } => self.ring.on_file(file, |file| {
                opcode::Fallocate::new(file, range.length())
                    .offset(range.offset())
                    .mode(*mode)
                    .build()
            }),
            Operation::Receive(message) => {
                let socket = Fd(message.socket.as_raw_fd());
                opcode::RecvMsg::new(socket, self.header(token, message)).build()
            }
            Operation::Send(message) => {
                let socket = Fd(message.socket.as_raw_fd());
                // Not MSG_WAITALL: the sender must see each part for which a slow peer makes space.
                let header = self.header(token, message);
                opcode::SendMsg::new(socket, header).flags(libc::MSG_NOSIGNAL as u32).build()
            }
            Operation::Command(command) => entry::command(command),
            Operation::Accept { socket } => {
                let socket = Fd(socket.as_raw_fd());
                opcode::Accept::new(socket, ptr::null_mut(), ptr::null_mut())
                    .flags(libc::SOCK_CLOEXEC)
                    .build()
            }
        }
    }

    fn header(&mut self, token: Token, message: &Message) -> *mut libc::msghdr {
        let header = &mut self.headers[token.index()];
        *header = message.header();
        header
    }

    /// Starts an operation by the main ring.
    fn start_interrupt(&mut self, token: Token, operation: &Operation) {
        let entry = self.entry_of(token, operation).user_data(token.as_u64());
        self.push(&entry);
    }

    fn watch_notifier(&mut self) {
        if !self.watches_notifier {
            let notifier = Fd(self.shared.notifier().as_raw_fd());
            let entry = opcode::PollAdd::new(notifier, libc::POLLIN as u32).multi(true).build();
            self.push(&entry.user_data(NOTIFIER));
            self.watches_notifier = true;
        }
    }

    fn renew_watches(&mut self) {
        while let Some(key) = self.ended.pop() {
            // A watch that was removed or cancelled is not renewed.
            if let Some(&descriptor) = self.watches.get(&key) {
                let entry = opcode::PollAdd::new(Fd(descriptor), libc::POLLIN as u32).multi(true);
                self.push(&entry.build().user_data(WATCH | u64::from(key.0)));
            }
        }
    }

    fn reap(&mut self, done: &mut Vec<Completion>) {
        for entry in self.ring.completions() {
            match entry.user_data() {
                // The eventfd is not read: each write to it is an event of its own, and it is
                // polled again only after the watch has ended.
                NOTIFIER => self.watches_notifier &= cqueue::more(entry.flags()),
                CANCEL => {}
                #[cfg(debug_assertions)]
                ATTEMPT => self.attempted = Some(entry.result()),
                watch if watch & WATCH != 0 => {
                    let key = WatchKey(watch as u32);
                    if !cqueue::more(entry.flags()) {
                        self.ended.push(key);
                    }
                    if entry.result() >= 0 {
                        self.events.push(key);
                    }
                }
                token => {
                    let token = Token::from_u64(token);
                    done.push(Completion { token, result: entry.result() });
                }
            }
        }
    }
}

impl Driver for Uring {
    fn try_inline(&mut self, operation: &Operation) -> Option<i32> {
        run_inline(operation)
    }

    fn start(&mut self, token: Token, operation: &Operation) {
        if !self.polled.start(token, operation) {
            self.start_interrupt(token, operation);
        }
    }

    fn set_fixed_files(&mut self, fixed: FixedFiles) {
        self.ring.set_fixed_files(fixed);
        self.polled.set_fixed_files(fixed);
    }

    fn unregister_file(&mut self, file: &FileId) {
        self.ring.unregister_file(file);
        self.polled.unregister_file(file);
    }

    fn io_poll(&mut self, io_poll: IoPoll) {
        self.polled.set(io_poll);
    }

    fn is_polling(&self) -> bool {
        self.polled.is_busy()
    }

    fn register_memory(&mut self, memory: &Registrations<Mapping>) -> io::Result<()> {
        self.ring.register_memory(memory)
    }

    fn unregister_memory(&mut self, mapping: &Mapping) {
        self.ring.unregister_memory(mapping);
    }

    fn unregister_all_memory(&mut self) {
        self.ring.unregister_all_memory();
    }

    fn reserve_slots(&mut self, count: u16) -> io::Result<(usize, Vec<u16>)> {
        self.ring.reserve_slots(count)
    }

    fn release_slots(&mut self, slots: Vec<u16>) {
        self.ring.release_slots(slots);
    }

    fn cancel(&mut self, token: Token, _operation: &Operation) {
        let entry = opcode::AsyncCancel::new(token.as_u64()).build().user_data(CANCEL);
        self.push(&entry);
    }

    fn may_have_events(&mut self) -> bool {
        !self.ring.completions().is_empty() || self.ring.has_completions()
    }

    fn watch(&mut self, key: WatchKey, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        self.watches.insert(key, descriptor.as_raw_fd());
        self.ended.push(key);
        Ok(())
    }

    fn unwatch(&mut self, key: WatchKey, _descriptor: BorrowedFd<'_>) {
        self.watches.remove(&key);
        let entry = opcode::AsyncCancel::new(WATCH | u64::from(key.0)).build();
        self.push(&entry.user_data(CANCEL));
    }

    fn next_event(&mut self) -> Option<WatchKey> {
        self.events.pop()
    }

    #[cfg(debug_assertions)]
    fn attempt_open(&mut self) -> Option<i32> {
        let entry = opcode::OpenAt::new(Fd(libc::AT_FDCWD), c"/etc/passwd".as_ptr()).build();
        self.push(&entry.user_data(ATTEMPT));
        loop {
            self.ring.enter(1, None);
            self.reap_early();
            if let Some(result) = self.attempted.take() {
                return Some(result);
            }
        }
    }

    fn poll(&mut self, wait: Wait, operations: &OperationTable, done: &mut Vec<Completion>) {
        self.watch_notifier();
        self.renew_watches();
        let waiting = std::mem::take(&mut self.has_reaped) || !self.ring.completions().is_empty();
        match wait {
            // Completions of this ring are visible in memory; `polled.poll` enters the other ring.
            _ if self.is_polling() && !self.ring.needs_enter() => {}
            _ if self.is_polling() => self.ring.enter(0, None),
            // Completions are visible in memory.
            Wait::Never if !self.ring.needs_enter() => {}
            Wait::Never => self.ring.enter(0, None),
            _ if waiting => self.ring.enter(0, None),
            Wait::Event => self.ring.enter(1, None),
            Wait::AtMost(left) => self.ring.enter(1, Some(left)),
        }
        let first = done.len();
        done.append(&mut self.ready);
        self.reap(done);
        for token in self.polled.poll(operations, done) {
            self.start_interrupt(token, operations.operation(token));
        }
        if unstarted::run_elsewhere(&self.shared, operations, done, first)
            && !std::mem::replace(&mut self.has_reported_unstarted, true)
        {
            tracing::warn!("{}", unstarted::REPORT);
        }
    }
}

#[cfg(test)]
mod tests;
