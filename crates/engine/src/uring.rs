//! The io_uring engine: files, sockets and the bell of a loop through one ring, one system call a
//! turn.
//!
//! The ring is made for one thread (`SINGLE_ISSUER`) where the kernel has that, and its completions
//! run when the loop asks for them (`DEFER_TASKRUN`), not in the middle of its work; so every call
//! that submits also gets events, or nothing would ever complete. That completions wait to be run is
//! seen in memory (`TASKRUN_FLAG`), so that looking out for them takes no system call.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::ptr;
use std::sync::Arc;
use std::time::Instant;

use blockhouse_core::{Segment, Sync};
use io_uring::types::{Fd, FsyncFlags, Timespec};
use io_uring::{IoUring, Probe, cqueue, opcode, squeue};

use crate::driver::{Completion, Driver, Rest};
use crate::file::File;
use crate::fixed::{FixedFiles, FixedTable, Number, Place};
use crate::operation::{MOST_OPERATIONS, Message, Operation, OperationTable, Token, Transfer};
use crate::remote::Remote;
use crate::system_call::run_inline;
use crate::watches::WatchKey;

/// Places for submissions between two system calls. More cost an extra call, nothing else.
const SUBMISSIONS: u32 = 256;

/// `enter` flags, from `<linux/io_uring.h>`.
const ENTER_GETEVENTS: u32 = 1;
const ENTER_EXT_ARG: u32 = 8;

/// Completions that belong to no operation of the table.
const BELL: u64 = u64::MAX;
const CANCEL: u64 = u64::MAX - 1;
/// Set in those of watches, whose key follows.
const WATCH: u64 = 1 << 32;

pub(crate) struct Uring {
    ring: IoUring,
    remote: Arc<Remote>,
    files: FixedTable,
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
}

/// The argument of `io_uring_enter` with `ENTER_EXT_ARG` (`struct io_uring_getevents_arg`).
#[repr(C)]
struct GetEvents {
    signals: u64,
    signals_size: u32,
    min_wait_usec: u32,
    timeout: u64,
}

impl Uring {
    /// A ring for the calling thread.
    ///
    /// # Errors
    /// The kernel's, where io_uring is missing, forbidden or too old.
    pub(crate) fn open(remote: &Arc<Remote>) -> io::Result<Self> {
        let ring = best_ring()?;
        check(&ring)?;
        // SAFETY: all-zero is a valid msghdr (null pointers and zero lengths).
        let no_header: libc::msghdr = unsafe { std::mem::zeroed() };
        let headers = vec![no_header; MOST_OPERATIONS].into_boxed_slice();
        let (remote, early) = (Arc::clone(remote), Vec::new());
        let files = FixedTable::new(remote.clone(), FixedFiles::Off);
        Ok(Self {
            ring,
            remote,
            files,
            watching: false,
            in_flight: 0,
            early,
            headers,
            watches: HashMap::new(),
            events: Vec::new(),
            ended: Vec::new(),
        })
    }

    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: what the entry points to belongs to an operation in the loop's table, which stays
        // there unmoved until the completion (`operation`'s promise); or it is the header for that
        // operation, which stays as long; or it points to nothing.
        while unsafe { self.ring.submission().push(entry) }.is_err() {
            self.enter(0, None);
            // The kernel may have refused because it has no room for more completions.
            let mut early = std::mem::take(&mut self.early);
            self.reap(&mut early);
            self.early = early;
        }
    }

    /// The entry for an operation. It points into the operation, or to its header.
    fn entry_of(&mut self, token: Token, operation: &Operation) -> squeue::Entry {
        match operation {
            Operation::Read(transfer) => self.on_file(&transfer.file, |file| read(file, transfer)),
            Operation::Write(transfer, through) => {
                self.on_file(&transfer.file, |file| write(file, transfer, through.flags()))
            }
            Operation::Sync { file, sync } => {
                let flags = match sync {
                    Sync::Data => FsyncFlags::DATASYNC,
                    Sync::Full => FsyncFlags::empty(),
                };
                self.on_file(file, |file| opcode::Fsync::new(file).flags(flags).build())
            }
            Operation::Allocate { file, mode, range } => self.on_file(file, |file| {
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
                // The kernel goes on by itself when the socket takes only a part.
                let flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
                let header = self.header(token, message);
                opcode::SendMsg::new(socket, header).flags(flags as u32).build()
            }
            Operation::Accept { socket } => {
                let socket = Fd(socket.as_raw_fd());
                opcode::Accept::new(socket, ptr::null_mut(), ptr::null_mut())
                    .flags(libc::SOCK_CLOEXEC)
                    .build()
            }
        }
    }

    /// The entry that `build` makes for the file, by its slot if it has one. The flag that says so comes
    /// last: what builds an entry sets all of its flags.
    fn on_file(&mut self, file: &File, build: impl FnOnce(Fd) -> squeue::Entry) -> squeue::Entry {
        match self.files.place(&self.ring.submitter(), &file.membership, file.raw()) {
            Place::Descriptor(descriptor) => build(Fd(descriptor)),
            Place::Slot(slot) => build(Fd(slot as i32)).flags(squeue::Flags::FIXED_FILE),
        }
    }

    fn header(&mut self, token: Token, message: &Message) -> *mut libc::msghdr {
        let place = &mut self.headers[token.index()];
        *place = message.header();
        place
    }

    /// Submits everything and waits for `want` completions, or until `until`.
    fn enter(&mut self, want: u32, until: Option<Instant>) {
        let timeout = until.map(|until| {
            let left = until.saturating_duration_since(Instant::now());
            Timespec::new().sec(left.as_secs()).nsec(left.subsec_nanos())
        });
        let argument = GetEvents {
            signals: 0,
            signals_size: 0,
            min_wait_usec: 0,
            timeout: timeout.as_ref().map_or(0, |timeout| ptr::from_ref(timeout).addr() as u64),
        };
        let count = self.ring.submission().len() as u32;
        let flags = ENTER_GETEVENTS | ENTER_EXT_ARG;
        // SAFETY: the entries were checked by `push`; `argument` is what EXT_ARG asks for and lives,
        // as the timeout that it points to, until the call returns.
        let entered = unsafe { self.ring.submitter().enter(count, want, flags, Some(&argument)) };
        if let Err(error) = entered {
            let code = error.raw_os_error().unwrap_or(0);
            // Interrupted, timed out, or the kernel wants its completions reaped first, which is
            // what happens next anyhow. Anything else is a mistake in this file.
            let expected = [libc::EINTR, libc::ETIME, libc::EBUSY, libc::EAGAIN];
            assert!(expected.contains(&code), "io_uring_enter failed: {error}");
        }
    }

    fn watch_bell(&mut self) {
        if !self.watching {
            let bell = Fd(self.remote.bell().as_raw_fd());
            let entry = opcode::PollAdd::new(bell, libc::POLLIN as u32).multi(true).build();
            self.push(&entry.user_data(BELL));
            self.watching = true;
        }
    }

    /// Whether there is something to submit, or the kernel says that a watch has news.
    fn has_business(&mut self) -> bool {
        let submission = self.ring.submission();
        !submission.is_empty() || submission.taskrun()
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

    fn reap(&mut self, done: &mut Vec<Completion>) {
        for entry in self.ring.completion() {
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
                token => {
                    self.in_flight -= 1;
                    let token = Token::from_u64(token);
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
        let entry = self.entry_of(token, operation).user_data(token.as_u64());
        self.push(&entry);
        self.in_flight += 1;
    }

    fn fix_files(&mut self, fixed: FixedFiles) {
        self.files.close(&self.ring.submitter());
        self.files = FixedTable::new(self.remote.clone(), fixed);
    }

    fn forget_file(&mut self, number: &Number) {
        self.files.forget(&self.ring.submitter(), number);
    }

    fn cancel(&mut self, token: Token, _operation: &Operation) {
        let entry = opcode::AsyncCancel::new(token.as_u64()).build().user_data(CANCEL);
        self.push(&entry);
    }

    fn may_have_events(&mut self) -> bool {
        !self.ring.completion().is_empty() || self.ring.submission().taskrun()
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

    fn turn(&mut self, rest: Rest, _: &OperationTable, done: &mut Vec<Completion>) {
        self.watch_bell();
        self.renew_watches();
        let waiting = !self.early.is_empty() || !self.ring.completion().is_empty();
        match rest {
            Rest::Never if self.in_flight == 0 && !self.has_business() => {}
            Rest::Never => self.enter(0, None),
            _ if waiting => self.enter(0, None),
            Rest::UntilEvent => self.enter(1, None),
            Rest::UntilEventOr(until) => self.enter(1, Some(until)),
        }
        done.append(&mut self.early);
        self.reap(done);
    }
}

fn read(file: Fd, transfer: &Transfer) -> squeue::Entry {
    match transfer.vector.segments() {
        [Segment { address, length }] => {
            opcode::Read::new(file, address.as_ptr(), bounded(*length))
                .offset(transfer.offset)
                .build()
        }
        many => {
            let (first, count) = array(many);
            opcode::Readv::new(file, first, count).offset(transfer.offset).build()
        }
    }
}

fn write(file: Fd, transfer: &Transfer, flags: i32) -> squeue::Entry {
    match transfer.vector.segments() {
        [Segment { address, length }] => {
            opcode::Write::new(file, address.as_ptr(), bounded(*length))
                .offset(transfer.offset)
                .rw_flags(flags)
                .build()
        }
        many => {
            let (first, count) = array(many);
            opcode::Writev::new(file, first, count).offset(transfer.offset).rw_flags(flags).build()
        }
    }
}

/// A transfer's length, cut to what the kernel does at once (`MAX_RW_COUNT`, a multiple of a page).
fn bounded(length: usize) -> u32 {
    length.min(0x7fff_f000) as u32
}

/// A `Segment` is laid out as an `iovec`.
fn array(segments: &[Segment]) -> (*const libc::iovec, u32) {
    (segments.as_ptr().cast(), segments.len().min(libc::UIO_MAXIOV as usize) as u32)
}

/// The best kind of ring that this kernel has.
fn best_ring() -> io::Result<IoUring> {
    let completions = 2 * MOST_OPERATIONS as u32;
    let mut builder = IoUring::builder();
    builder.setup_cqsize(completions).setup_clamp().dontfork();
    let kinds: [fn(&mut io_uring::Builder); 3] = [
        |builder| {
            builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
            builder.setup_submit_all();
        },
        |builder| {
            builder.setup_coop_taskrun().setup_taskrun_flag();
            builder.setup_submit_all();
        },
        |_| {},
    ];
    let mut refused = io::Error::from_raw_os_error(libc::EINVAL);
    for kind in kinds {
        let mut attempt = builder.clone();
        kind(&mut attempt);
        match attempt.build(SUBMISSIONS) {
            Ok(ring) => return Ok(ring),
            // A flag that the kernel does not know.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => refused = error,
            Err(error) => return Err(error),
        }
    }
    Err(refused)
}

/// Refuses a ring that lacks something this engine uses.
fn check(ring: &IoUring) -> io::Result<()> {
    let too_old = |what: &str| {
        let text = format!("this kernel's io_uring is too old: it lacks {what}");
        Err(io::Error::new(io::ErrorKind::Unsupported, text))
    };
    let parameters = ring.params();
    if !parameters.is_feature_nodrop() || !parameters.is_feature_ext_arg() {
        return too_old("kept completions or timed waits");
    }
    // It came together with this feature, and nothing else tells.
    if !parameters.is_feature_resource_tagging() {
        return too_old("polls that stay");
    }
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let needed = [
        ("read", opcode::Read::CODE),
        ("write", opcode::Write::CODE),
        ("readv", opcode::Readv::CODE),
        ("writev", opcode::Writev::CODE),
        ("fsync", opcode::Fsync::CODE),
        ("fallocate", opcode::Fallocate::CODE),
        ("recvmsg", opcode::RecvMsg::CODE),
        ("sendmsg", opcode::SendMsg::CODE),
        ("accept", opcode::Accept::CODE),
        ("poll", opcode::PollAdd::CODE),
        ("cancel", opcode::AsyncCancel::CODE),
    ];
    match needed.into_iter().find(|&(_, code)| !probe.is_supported(code)) {
        Some((name, _)) => too_old(name),
        None => Ok(()),
    }
}
