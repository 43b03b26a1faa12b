//! Operations as plain system calls: by worker threads, and by every engine inline for files in
//! memory. Results are as the kernel gives them: a count or a negative errno.

use std::os::fd::{AsRawFd, RawFd};

use blockhouse_core::{Segment, SyncMode};

use crate::driver::file::Medium;
use crate::driver::operation::{Message, Operation};

/// The largest transfer that is worth doing inline: about 50 microseconds of copying.
const MAX_INLINE: usize = 512 << 10;

/// A file operation reduced to the arguments of a system call. It borrows from an [`Operation`]
/// without a lifetime, see [`FileCall::run`].
#[derive(Clone, Copy)]
pub(crate) enum FileCall {
    Read { file: RawFd, offset: u64, segments: Segments },
    Write { file: RawFd, offset: u64, segments: Segments, flags: i32 },
    Sync { file: RawFd, sync: SyncMode },
    Allocate { file: RawFd, mode: i32, offset: u64, length: u64 },
}

/// An array of segments by address.
#[derive(Clone, Copy)]
pub(crate) struct Segments {
    pub(crate) first: *const Segment,
    pub(crate) count: usize,
}

impl Segments {
    fn of(segments: &[Segment]) -> Self {
        Self { first: segments.as_ptr(), count: segments.len().min(libc::UIO_MAXIOV as usize) }
    }
}

// SAFETY: what the addresses point to is owned by an operation in a loop's table, which keeps it
// alive and untouched until the result of `run` is reported to that loop (guaranteed by
// `operation`).
unsafe impl Send for FileCall {}

impl FileCall {
    /// The call for a file operation; `None` for one on a socket, and for a command, which has no
    /// call.
    pub(crate) fn of(operation: &Operation) -> Option<Self> {
        Some(match operation {
            Operation::Read(transfer) => Self::Read {
                file: transfer.file.raw(),
                offset: transfer.offset,
                segments: Segments::of(transfer.vector.segments()),
            },
            Operation::Write(transfer, through) => Self::Write {
                file: transfer.file.raw(),
                offset: transfer.offset,
                segments: Segments::of(transfer.vector.segments()),
                flags: through.flags(),
            },
            Operation::Sync { file, sync } => Self::Sync { file: file.raw(), sync: *sync },
            Operation::Allocate { file, mode, range, .. } => Self::Allocate {
                file: file.raw(),
                mode: *mode,
                offset: range.offset(),
                length: range.length(),
            },
            Operation::Receive(_) | Operation::Send(_) | Operation::Accept { .. } => return None,
            Operation::Command(_) => return None,
        })
    }

    /// Makes the call and waits for it.
    ///
    /// # Safety
    /// The operation that this was made from must still exist, unmoved, and must not be used
    /// otherwise.
    pub(crate) unsafe fn run(self) -> i32 {
        // SAFETY: descriptor and segments belong to an operation that exists (the caller guarantees
        // it), so the descriptor is open and the segments are valid for the kernel to read
        // and write.
        retry(|| unsafe {
            match self {
                // One segment needs no array to be copied in, which saves a twentieth of a short
                // read.
                Self::Read { file, offset, segments: Segments { first, count: 1 } } => {
                    let Segment { address, length } = *first;
                    libc::pread(file, address.as_ptr().cast(), length, offset as i64)
                }
                Self::Read { file, offset, segments: Segments { first, count } } => {
                    libc::preadv2(file, first.cast(), count as i32, offset as i64, 0)
                }
                Self::Write { file, offset, segments: Segments { first, count }, flags } => {
                    libc::pwritev2(file, first.cast(), count as i32, offset as i64, flags)
                }
                Self::Sync { file, sync: SyncMode::Data } => libc::fdatasync(file) as isize,
                Self::Sync { file, sync: SyncMode::Full } => libc::fsync(file) as isize,
                Self::Allocate { file, mode, offset, length } => {
                    libc::fallocate(file, mode, offset as i64, length as i64) as isize
                }
            }
        })
    }
}

/// Carries out operations that are immediate for a file in memory: a short transfer, or a sync,
/// which has nothing to do there. `None` for all others.
pub(crate) fn run_inline(operation: &Operation) -> Option<i32> {
    let (file, length) = match operation {
        Operation::Read(transfer) | Operation::Write(transfer, _) => {
            (&transfer.file, transfer.vector.len())
        }
        Operation::Sync { file, .. } => (file, 0),
        _ => return None,
    };
    if file.medium != Medium::Memory || length > MAX_INLINE {
        return None;
    }
    // SAFETY: the operation is borrowed for as long as the call takes.
    FileCall::of(operation).map(|call| unsafe { call.run() })
}

/// Tries a socket operation without waiting: `-EAGAIN` if it would have to wait.
pub(crate) fn try_socket(operation: &Operation) -> i32 {
    match operation {
        Operation::Receive(message) => transfer(message, |socket, header| {
            // SAFETY: the header and what it points to belong to the borrowed message.
            unsafe { libc::recvmsg(socket, header, libc::MSG_DONTWAIT) }
        }),
        Operation::Send(message) => transfer(message, |socket, header| {
            // SAFETY: as above.
            unsafe { libc::sendmsg(socket, header, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) }
        }),
        Operation::Accept { socket } => retry(|| {
            let (no_address, no_length) = (std::ptr::null_mut(), std::ptr::null_mut());
            // SAFETY: null is allowed for both: the peer's address is not needed. The descriptor is
            // open: the operation owns it.
            let accepted = unsafe {
                libc::accept4(socket.as_raw_fd(), no_address, no_length, libc::SOCK_CLOEXEC)
            };
            accepted as isize
        }),
        Operation::Read(_) | Operation::Write(..) | Operation::Sync { .. } => -libc::EINVAL,
        Operation::Allocate { .. } | Operation::Command(_) => -libc::EINVAL,
    }
}

fn transfer(message: &Message, call: impl Fn(RawFd, *mut libc::msghdr) -> isize) -> i32 {
    let mut header = message.header();
    let socket = message.socket.as_raw_fd();
    retry(|| call(socket, &raw mut header))
}

/// Repeats a call that a signal interrupts; turns "-1 and errno" into a negative errno.
fn retry(mut call: impl FnMut() -> isize) -> i32 {
    loop {
        let result = call();
        if result >= 0 {
            // A transfer is at most 2^31 - 4096 bytes (`MAX_RW_COUNT` in Linux).
            return i32::try_from(result).unwrap_or(i32::MAX);
        }
        let code = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        if code != libc::EINTR {
            return -code;
        }
    }
}
