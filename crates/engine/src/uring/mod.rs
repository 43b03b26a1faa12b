//! The io_uring engine: files, sockets and the bell of a loop through one ring, one system call a
//! turn. Operations that are polled for have a second ring beside it (`polled`), and while there are
//! any, a turn does not sleep.

mod entry;
mod polled;
mod ring;

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::ptr;
use std::sync::Arc;

use blockhouse_core::SyncMode;
use io_uring::types::{Fd, FsyncFlags};
use io_uring::{cqueue, opcode, squeue};

use crate::driver::{Completion, Driver, Rest};
use crate::fixed::{FixedFiles, Number};
use crate::io_poll::IoPoll;
use crate::mapping::Mapping;
use crate::membership::Membership;
use crate::operation::{MAX_OPERATIONS, Message, Operation, OperationTable, Token};
use crate::remote::Remote;
use crate::system_call::run_inline;
use crate::watches::WatchKey;
use polled::PolledRing;
use ring::{Completions, Ring};

/// Completions that belong to no operation of the table.
const BELL: u64 = u64::MAX;
const CANCEL: u64 = u64::MAX - 1;
/// Set in those of watches, whose key follows.
const WATCH: u64 = 1 << 32;
/// Set in those of questions whether the kernel still has an operation, whose token follows.
const PROBE: u64 = 1 << 33;

pub(crate) struct Uring {
    ring: Ring,
    polled: PolledRing,
    remote: Arc<Remote>,
    /// Whether the ring watches the bell.
    watching: bool,
    /// How many operations the kernel has.
    in_flight: usize,
    /// Fetched already, to be reported by the next turn.
    early: Vec<Completion>,
    /// Of the operation with that token, if it is one on a socket: the kernel reads it there.
    headers: Box<[libc::msghdr]>,
    /// What is watched.
    watches: HashMap<WatchKey, RawFd>,
    /// Events of watches that were not reported yet.
    events: Vec<WatchKey>,
    /// Watches that the kernel ended, to be renewed.
    ended: Vec<WatchKey>,
    /// Operations that the kernel was asked about after it dropped completions, as long as neither their
    /// completion nor the answer has come.
    probed: HashSet<Token>,
}

impl Uring {
    /// A ring for the calling thread.
    ///
    /// # Errors
    /// The kernel's, where io_uring is missing, forbidden or too old.
    pub(crate) fn open(remote: &Arc<Remote>) -> io::Result<Self> {
        let ring = Ring::open(remote, Completions::Announced)?;
        // SAFETY: all-zero is a valid msghdr (null pointers and zero lengths).
        let no_header: libc::msghdr = unsafe { std::mem::zeroed() };
        let headers = vec![no_header; MAX_OPERATIONS].into_boxed_slice();
        let (remote, early) = (Arc::clone(remote), Vec::new());
        Ok(Self {
            ring,
            polled: PolledRing::new(&remote),
            remote,
            watching: false,
            in_flight: 0,
            early,
            headers,
            watches: HashMap::new(),
            events: Vec::new(),
            ended: Vec::new(),
            probed: HashSet::new(),
        })
    }

    fn push(&mut self, entry: &squeue::Entry) {
        while self.ring.push(entry).is_err() {
            self.ring.enter(0, None);
            // The kernel may have refused because it has no room for more completions.
            let mut early = std::mem::take(&mut self.early);
            self.reap(&mut early);
            self.early = early;
        }
    }

    /// The entry for an operation. It points into the operation, or to its header.
    fn entry_of(&mut self, token: Token, operation: &Operation) -> squeue::Entry {
        match operation {
            Operation::Read(transfer) => {
                let slot = self.ring.slot_of(&transfer.vector);
                self.ring.on_file(&transfer.file, |file| entry::read(file, transfer, slot))
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
            Operation::Allocate { file, mode, range } => self.ring.on_file(file, |file| {
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
                // Not MSG_WAITALL: the sender shall see each part that a slow peer makes room for.
                let header = self.header(token, message);
                opcode::SendMsg::new(socket, header).flags(libc::MSG_NOSIGNAL as u32).build()
            }
            Operation::Accept { socket } => {
                let socket = Fd(socket.as_raw_fd());
                opcode::Accept::new(socket, ptr::null_mut(), ptr::null_mut())
                    .flags(libc::SOCK_CLOEXEC)
                    .build()
            }
        }
    }

    fn header(&mut self, token: Token, message: &Message) -> *mut libc::msghdr {
        let place = &mut self.headers[token.index()];
        *place = message.header();
        place
    }

    /// Starts an operation by the main ring.
    fn start_announced(&mut self, token: Token, operation: &Operation) {
        let entry = self.entry_of(token, operation).user_data(token.as_u64());
        self.push(&entry);
        self.in_flight += 1;
    }

    fn watch_bell(&mut self) {
        if !self.watching {
            let bell = Fd(self.remote.bell().as_raw_fd());
            let entry = opcode::PollAdd::new(bell, libc::POLLIN as u32).multi(true).build();
            self.push(&entry.user_data(BELL));
            self.watching = true;
        }
    }

    fn renew_watches(&mut self) {
        while let Some(key) = self.ended.pop() {
            // One that is gone, or ends by being cancelled, is not renewed.
            if let Some(&descriptor) = self.watches.get(&key) {
                let entry = opcode::PollAdd::new(Fd(descriptor), libc::POLLIN as u32).multi(true);
                self.push(&entry.build().user_data(WATCH | u64::from(key.0)));
            }
        }
    }

    /// Asks the kernel about every operation after it dropped completions. It cancels those that it still
    /// has, and does not find those whose completion is lost: these fail. Completions keep their order, so an
    /// operation whose completion is only late is not taken for lost.
    fn probe_lost(&mut self, operations: &OperationTable) {
        // The other ring's operations are not known to this one.
        if !self.ring.has_lost_completions || self.polled.is_busy() {
            return;
        }
        self.ring.has_lost_completions = false;
        for token in operations.running() {
            self.probed.insert(token);
            let entry = opcode::AsyncCancel::new(token.as_u64()).build();
            self.push(&entry.user_data(PROBE | token.as_u64()));
        }
    }

    fn reap(&mut self, done: &mut Vec<Completion>) {
        for entry in self.ring.completions() {
            match entry.user_data() {
                // The bell is not read: each ring of it is an event of its own, and nothing polls it
                // afresh but after the watch ended.
                BELL => self.watching &= cqueue::more(entry.flags()),
                CANCEL => {}
                watch if watch & WATCH != 0 => {
                    let key = WatchKey(watch as u32);
                    if !cqueue::more(entry.flags()) {
                        self.ended.push(key);
                    }
                    if entry.result() >= 0 {
                        self.events.push(key);
                    }
                }
                probe if probe & PROBE != 0 => {
                    let token = Token::from_u64(probe & !PROBE);
                    if self.probed.remove(&token) && entry.result() == -libc::ENOENT {
                        self.in_flight -= 1;
                        done.push(Completion { token, result: -libc::EIO });
                    }
                }
                token => {
                    self.in_flight -= 1;
                    let token = Token::from_u64(token);
                    if !self.probed.is_empty() {
                        self.probed.remove(&token);
                    }
                    done.push(Completion { token, result: entry.result() });
                }
            }
        }
    }
}

impl Driver for Uring {
    fn attempt(&mut self, operation: &Operation) -> Option<i32> {
        run_inline(operation)
    }

    fn start(&mut self, token: Token, operation: &Operation) {
        if !self.polled.start(token, operation) {
            self.start_announced(token, operation);
        }
    }

    fn fix_files(&mut self, fixed: FixedFiles) {
        self.ring.fix_files(fixed);
        self.polled.fix_files(fixed);
    }

    fn forget_file(&mut self, number: &Number) {
        self.ring.forget_file(number);
        self.polled.forget_file(number);
    }

    fn io_poll(&mut self, io_poll: IoPoll) {
        self.polled.set(io_poll);
    }

    fn is_polling(&self) -> bool {
        self.polled.is_busy()
    }

    fn register_memory(&mut self, memory: &Membership<Mapping>) -> io::Result<()> {
        self.ring.register_memory(memory)
    }

    fn forget_memory(&mut self, mapping: &Mapping) {
        self.ring.forget_memory(mapping);
    }

    fn forget_all_memory(&mut self) {
        self.ring.forget_all_memory();
    }

    fn cancel(&mut self, token: Token, _operation: &Operation) {
        let entry = opcode::AsyncCancel::new(token.as_u64()).build().user_data(CANCEL);
        self.push(&entry);
    }

    fn may_have_events(&mut self) -> bool {
        !self.ring.completions().is_empty() || self.ring.has_news()
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

    fn turn(&mut self, rest: Rest, operations: &OperationTable, done: &mut Vec<Completion>) {
        self.watch_bell();
        self.renew_watches();
        self.probe_lost(operations);
        let waiting = !self.early.is_empty() || !self.ring.completions().is_empty();
        match rest {
            // Completions of this ring show in memory, and the other one is entered anyhow.
            _ if self.is_polling() && !self.ring.has_business() => {}
            _ if self.is_polling() => self.ring.enter(0, None),
            Rest::Never if self.in_flight == 0 && !self.ring.has_business() => {}
            Rest::Never => self.ring.enter(0, None),
            _ if waiting => self.ring.enter(0, None),
            Rest::UntilEvent => self.ring.enter(1, None),
            Rest::UntilEventOr(until) => self.ring.enter(1, Some(until)),
        }
        done.append(&mut self.early);
        self.reap(done);
        for token in self.polled.turn(operations, done) {
            self.start_announced(token, operations.operation(token));
        }
    }
}

#[cfg(test)]
mod tests;
