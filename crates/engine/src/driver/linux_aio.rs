//! Linux AIO by its raw system calls (`io_setup(2)` and friends, `<linux/aio_abi.h>`): asynchronous
//! reads and writes of files opened for direct I/O. All other operations are not done here;
//! buffered reads and writes would block in `io_submit`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use crate::driver::Completion;
use crate::driver::broken_wait::BrokenWait;
use crate::driver::file::{Caching, Medium};
use crate::driver::operation::{MAX_OPERATIONS, Operation, Token, Transfer};
use crate::driver::system_call::FileCall;

const PREAD: u16 = 0;
const POLL: u16 = 5;
const PREADV: u16 = 7;
const PWRITEV: u16 = 8;
/// `IOCB_FLAG_RESFD`: the completion signals `aio_resfd`.
const RESFD: u32 = 1;

/// Completions fetched by one system call.
const BATCH: usize = 128;

/// `struct iocb`. The order of `key` and `rw_flags` depends on the byte order.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ControlBlock {
    data: u64,
    #[cfg(target_endian = "little")]
    key: u32,
    rw_flags: i32,
    #[cfg(target_endian = "big")]
    key: u32,
    opcode: u16,
    priority: i16,
    file: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    event_fd: u32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Event {
    data: u64,
    object: u64,
    result: i64,
    result2: i64,
}

/// The head of the completion ring that the kernel maps at the context's address (`struct
/// aio_ring` in the kernel's `fs/aio.c`).
#[repr(C)]
struct Ring {
    id: u32,
    entries: u32,
    head: std::sync::atomic::AtomicU32,
    tail: std::sync::atomic::AtomicU32,
}

pub(crate) struct LinuxAio {
    context: u64,
    event: OwnedFd,
    /// One block per token; the kernel copies a block when it is submitted.
    blocks: Box<[ControlBlock]>,
    queued: Vec<Token>,
    /// The addresses of the queued blocks, for `io_submit`; kept for its capacity.
    addresses: Vec<*const ControlBlock>,
    in_flight: usize,
    broken_wait: BrokenWait,
}

impl LinuxAio {
    /// # Errors
    /// The kernel's error: ENOSYS if Linux AIO is not built in, EAGAIN if `/proc/sys/fs/aio-max-nr`
    /// is used up, EPERM if it is forbidden.
    pub(crate) fn open() -> io::Result<Self> {
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let event = rustix::event::eventfd(0, flags)?;
        let mut context = 0u64;
        // SAFETY: the kernel writes the context's address to `context`, which must be zero before.
        check(unsafe { libc::syscall(libc::SYS_io_setup, MAX_OPERATIONS, &raw mut context) })?;
        let blocks = vec![ControlBlock::default(); MAX_OPERATIONS].into_boxed_slice();
        let (queued, addresses, broken_wait) = (Vec::new(), Vec::new(), BrokenWait::default());
        Ok(Self { context, event, blocks, queued, addresses, in_flight: 0, broken_wait })
    }

    /// The descriptor that becomes readable when something completed.
    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Whether the operation is asynchronous with Linux AIO. A file in memory accepts `O_DIRECT`
    /// but still copies, in `io_submit`.
    pub(crate) fn serves(operation: &Operation) -> bool {
        match operation {
            Operation::Read(Transfer { file, .. }) | Operation::Write(Transfer { file, .. }, _) => {
                file.caching == Caching::Direct && file.medium != Medium::Memory
            }
            _ => false,
        }
    }

    /// Queues a read or write for the next `submit`.
    pub(crate) fn queue(&mut self, token: Token, call: FileCall) {
        let (opcode, file, offset, segments, rw_flags) = match call {
            FileCall::Read { file, offset, segments } => (PREADV, file, offset, segments, 0),
            FileCall::Write { file, offset, segments, flags } => {
                (PWRITEV, file, offset, segments, flags)
            }
            FileCall::Sync { .. } | FileCall::Allocate { .. } => {
                unreachable!("`serves` was asked before")
            }
        };
        self.blocks[token.index()] = ControlBlock {
            data: token.as_u64(),
            rw_flags,
            opcode,
            file: file as u32,
            buffer: segments.first.addr() as u64,
            bytes: segments.count as u64,
            offset: offset as i64,
            flags: RESFD,
            event_fd: self.event.as_raw_fd() as u32,
            ..ControlBlock::default()
        };
        self.queued.push(token);
    }

    /// Submits queued operations. Operations that the kernel rejects are reported to `done`; those
    /// for which it has no space stay queued.
    pub(crate) fn submit(&mut self, done: &mut Vec<Completion>) {
        let mut first = 0;
        self.addresses.clear();
        let address = |token: &Token| &raw const self.blocks[token.index()];
        self.addresses.extend(self.queued.iter().map(address));
        while first < self.queued.len() {
            let batch = &self.addresses[first..];
            // SAFETY: `batch` holds that many valid addresses; each block points to segments of an
            // operation that stays in the loop's table until its completion.
            let result = check(unsafe {
                libc::syscall(libc::SYS_io_submit, self.context, batch.len(), batch.as_ptr())
            });
            match result {
                Ok(count) => {
                    first += count;
                    self.in_flight += count;
                }
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => break,
                Err(error) => {
                    let code = error.raw_os_error().unwrap_or(libc::EIO);
                    done.push(Completion { token: self.queued[first], result: -code });
                    first += 1;
                }
            }
        }
        self.queued.drain(..first);
    }

    /// Whether operations are queued and none is in flight: no completion comes before the next
    /// `submit`.
    pub(crate) fn is_stuck(&self) -> bool {
        !self.queued.is_empty() && self.in_flight == 0
    }

    /// Fetches all completions in the ring.
    pub(crate) fn reap(&mut self, done: &mut Vec<Completion>) {
        while self.in_flight > 0 && self.has_completions() {
            let mut events = [Event::default(); BATCH];
            let mut no_wait = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            // SAFETY: `events` has capacity for BATCH events; the timeout is only read.
            let result = check(unsafe {
                libc::syscall(
                    libc::SYS_io_getevents,
                    self.context,
                    0,
                    BATCH,
                    events.as_mut_ptr(),
                    &raw mut no_wait,
                )
            });
            let count = match result {
                Ok(count) => count,
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => continue,
                // The next `poll` tries again.
                Err(error) => return self.broken_wait.failed("io_getevents", &error),
            };
            self.broken_wait.worked();
            self.in_flight -= count;
            done.extend(events[..count].iter().map(|event| Completion {
                token: Token::from_u64(event.data),
                result: event.result as i32,
            }));
        }
    }

    fn has_completions(&self) -> bool {
        let ring = self.context as *const Ring;
        // SAFETY: the context's address is where the kernel maps the ring, until `io_destroy`; the
        // kernel changes only the two counters, which are read as atomics.
        let (head, tail) = unsafe { (&(*ring).head, &(*ring).tail) };
        use std::sync::atomic::Ordering::Acquire;
        head.load(Acquire) != tail.load(Acquire)
    }
}

impl Drop for LinuxAio {
    fn drop(&mut self) {
        // SAFETY: the context is this object's own. The call waits for operations in flight.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

/// Signals an eventfd by the completion of an operation that does nothing (see `event_signal`).
pub(crate) struct Signaller {
    context: u64,
    /// A private eventfd that is always readable, so that a poll of it completes at once.
    readable: OwnedFd,
    /// The eventfd to signal.
    event: OwnedFd,
}

impl Signaller {
    /// # Errors
    /// The kernel's error: `EINVAL` if `event` is not an eventfd; or the errors of
    /// [`LinuxAio::open`].
    pub(crate) fn new(event: BorrowedFd<'_>) -> io::Result<Self> {
        let readable = rustix::event::eventfd(1, rustix::event::EventfdFlags::CLOEXEC)?;
        let event = event.try_clone_to_owned()?;
        let mut context = 0u64;
        // SAFETY: the kernel writes the context's address to `context`, which must be zero before.
        check(unsafe { libc::syscall(libc::SYS_io_setup, 1, &raw mut context) })?;
        let signaller = Self { context, readable, event };
        // The kernel checks the eventfd first, then fails because this address is not valid.
        let nowhere =
            ControlBlock { opcode: PREAD, buffer: u64::MAX, bytes: 8, ..signaller.block() };
        match signaller.submit(&nowhere) {
            Err(error) if error.raw_os_error() == Some(libc::EFAULT) => Ok(signaller),
            Err(error) => Err(error),
            Ok(()) => Err(io::Error::from_raw_os_error(libc::ENOSYS)),
        }
    }

    /// Adds 1 to the eventfd's counter, unless the counter is full.
    pub(crate) fn signal(&self) {
        let poll = ControlBlock { opcode: POLL, buffer: libc::POLLIN as u64, ..self.block() };
        while let Err(error) = self.submit(&poll) {
            if error.raw_os_error() != Some(libc::EAGAIN) {
                break;
            }
            std::thread::yield_now();
        }
        // The completion is not needed, but occupies an entry of the ring, which is freed here.
        let ring = self.context as *const Ring;
        // SAFETY: as in `has_completions`. The head is this side's to change.
        let (head, tail) = unsafe { (&(*ring).head, &(*ring).tail) };
        use std::sync::atomic::Ordering::{Acquire, Release};
        head.store(tail.load(Acquire), Release);
    }

    fn block(&self) -> ControlBlock {
        ControlBlock {
            file: self.readable.as_raw_fd() as u32,
            flags: RESFD,
            event_fd: self.event.as_raw_fd() as u32,
            ..ControlBlock::default()
        }
    }

    fn submit(&self, block: &ControlBlock) -> io::Result<()> {
        let blocks = [std::ptr::from_ref(block)];
        // SAFETY: one valid address of a block, which the kernel copies; the block names no memory
        // of ours.
        let result =
            unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1, blocks.as_ptr()) };
        check(result).map(|_| ())
    }
}

impl Drop for Signaller {
    fn drop(&mut self) {
        // SAFETY: the context is this object's own; nothing is in flight.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

fn check(result: libc::c_long) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}
