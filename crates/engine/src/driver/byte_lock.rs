//! Locks on single bytes of a file that belong to the open file, not to the process (open file
//! description locks, `fcntl(2)`). QEMU's image locks are made of these.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Acquires a shared lock on the byte at `offset`, without waiting. It is released with the last
/// copy of the descriptor.
///
/// # Errors
/// EAGAIN or EACCES if another open of the file holds it exclusively; EBADF for a file not open for
/// reading; the errno of a file system without locks.
pub fn lock_byte_shared(file: BorrowedFd<'_>, offset: u64) -> io::Result<()> {
    call(file, libc::F_OFD_SETLK, libc::F_RDLCK, byte(offset)).map(drop)
}

/// Releases the lock on the byte at `offset`.
///
/// # Errors
/// The errors of [`lock_byte_shared`].
pub fn unlock_byte(file: BorrowedFd<'_>, offset: u64) -> io::Result<()> {
    call(file, libc::F_OFD_SETLK, libc::F_UNLCK, byte(offset)).map(drop)
}

/// Whether another open of the file holds any lock on the byte.
///
/// # Errors
/// The errors of [`lock_byte_shared`].
pub fn is_byte_locked(file: BorrowedFd<'_>, offset: u64) -> io::Result<bool> {
    let lock = call(file, libc::F_OFD_GETLK, libc::F_WRLCK, byte(offset))?;
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

/// Releases the locks on all bytes.
pub(crate) fn release_all(file: BorrowedFd<'_>) -> io::Result<()> {
    call(file, libc::F_OFD_SETLK, libc::F_UNLCK, ALL).map(drop)
}

/// Start and length of a range; a length of 0 means to the end of the file, wherever it is.
type Range = (i64, i64);

const ALL: Range = (0, 0);

fn byte(offset: u64) -> Range {
    (offset as i64, 1)
}

fn call(
    file: BorrowedFd<'_>,
    command: i32,
    kind: i32,
    (start, length): Range,
) -> io::Result<libc::flock> {
    // SAFETY: all-zero is a valid flock (POSIX: whole-file, process 0).
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as i16;
    lock.l_whence = libc::SEEK_SET as i16;
    lock.l_start = start;
    lock.l_len = length;
    // SAFETY: the commands used here read and write one flock; the descriptor is open.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) } {
        0 => Ok(lock),
        _ => Err(io::Error::last_os_error()),
    }
}
