//! The limit on open descriptors (`RLIMIT_NOFILE`), and the other needs of an accepted connection.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::fs::{FileType, fstat};
use rustix::io::{Errno, FdFlags};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The hint in an error message when descriptors run out.
pub const DESCRIPTORS_HINT: &str =
    "raise the limit on open files (ulimit -Hn, LimitNOFILE= of the service)";

/// How often a shortage that lasts is reported.
const REPORT_PERIOD: Duration = Duration::from_secs(60);

/// Raises this process's limit on open descriptors as far as allowed, and returns the new limit;
/// `None` means no limit.
///
/// The soft limit is low for the sake of programs that use `select(2)`, which accepts only
/// descriptors below 1024. This program does not use it.
///
/// # Errors
/// The kernel's error; the limit stays as it is.
pub fn raise_descriptor_limit() -> io::Result<Option<u64>> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum {
        setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?;
    }
    Ok(maximum)
}

/// Keeps programs that this process executes from inheriting its descriptors, except standard
/// input, output and error. Reason: sockets of the service manager come without `FD_CLOEXEC`, and a
/// process that has one keeps its address in use.
///
/// # Errors
/// The kernel's error: ENOSYS or EINVAL before Linux 5.11.
pub fn keep_descriptors_from_children() -> io::Result<()> {
    /// `CLOSE_RANGE_CLOEXEC` of `<linux/close_range.h>`.
    const CLOEXEC: libc::c_uint = 4;
    // SAFETY: with this flag the call closes nothing, and it takes no pointer.
    match unsafe {
        libc::syscall(libc::SYS_close_range, 3 as libc::c_uint, libc::c_uint::MAX, CLOEXEC)
    } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Takes a socket that the program which started this process has passed by this number.
///
/// # Errors
/// `ENOTSOCK` if no socket was passed so. Standard input, output and error are not passed sockets.
pub fn take_inherited_socket(number: i32) -> io::Result<OwnedFd> {
    let none = || io::Error::from(Errno::NOTSOCK);
    if number < 3 {
        return Err(none());
    }
    // SAFETY: `fcntl` takes no pointer, and these commands change no file.
    let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
    // Each descriptor that this process has opened, or taken here before, is close-on-exec.
    if flags < 0 || flags & libc::FD_CLOEXEC != 0 {
        return Err(none());
    }
    // SAFETY: the descriptor is open, and was inherited, so nothing in this process owns it.
    let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
    rustix::io::fcntl_setfd(&descriptor, FdFlags::CLOEXEC)?;
    let is_socket = FileType::from_raw_mode(fstat(&descriptor)?.st_mode) == FileType::Socket;
    if is_socket { Ok(descriptor) } else { Err(none()) }
}

/// Whether a connection could not be accepted because descriptors or memory ran out. The connection
/// then waits in the kernel's queue, and can be accepted later.
pub fn is_shortage(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    is_out_of_descriptors(error) || matches!(errno, Some(Errno::NOMEM | Errno::NOBUFS))
}

/// Whether a call failed because this process or the host has no more descriptors.
pub fn is_out_of_descriptors(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}

/// Reports shortages that keep connections from being accepted or served, at most once a minute.
#[derive(Debug, Default)]
pub struct ShortageLog(Mutex<Option<Instant>>);

impl ShortageLog {
    /// Writes a warning that begins with `effect`, unless there was one within the last minute.
    pub fn warn(&self, effect: &str, error: &io::Error) {
        if self.is_due(Instant::now()) {
            let hint = if is_out_of_descriptors(error) {
                DESCRIPTORS_HINT
            } else {
                "the host is short of memory"
            };
            tracing::warn!("{effect}: {error}; {hint}");
        }
    }

    fn is_due(&self, now: Instant) -> bool {
        let mut last = self.0.lock();
        let is_due = last.is_none_or(|last| now.saturating_duration_since(last) >= REPORT_PERIOD);
        if is_due {
            *last = Some(now);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortage_is_reported_once_a_minute() {
        let log = ShortageLog::default();
        let start = Instant::now();
        let due = [0, 1, 59, 60, 61, 121].map(|s| log.is_due(start + Duration::from_secs(s)));
        assert_eq!(due, [true, false, false, true, false, true]);
    }
}
