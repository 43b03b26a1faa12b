//! Attempts of an attacker inside the process, for tests of the sandbox. Only in builds with debug
//! assertions.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::ptr;

use io_uring::IoUring;
use rustix::mm::{MapFlags, ProtFlags};

use crate::event_loop::local;

/// Lets the parent process trace this one, as a debugger's child does.
///
/// # Errors
/// The kernel's error.
pub fn trace() -> io::Result<()> {
    // SAFETY: the request takes no memory.
    match unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Blocks all signals on the calling thread, as threads of some libraries do.
///
/// # Errors
/// The kernel's error.
pub fn block_signals() -> io::Result<()> {
    let mut signals = MaybeUninit::uninit();
    // SAFETY: the first call fills the set, which the second one reads; both are of this thread.
    let errno = unsafe {
        libc::sigfillset(signals.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, signals.as_ptr(), ptr::null_mut())
    };
    if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(errno)) }
}

/// Maps a page that can be written and executed.
///
/// # Errors
/// The kernel's error.
pub fn make_memory_executable() -> io::Result<()> {
    let access = ProtFlags::READ | ProtFlags::WRITE | ProtFlags::EXEC;
    // SAFETY: a new mapping, at an address that the kernel chooses. Nothing uses it.
    unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), 4096, access, MapFlags::PRIVATE) }?;
    Ok(())
}

/// Makes a ring without restrictions.
///
/// # Errors
/// The kernel's error.
pub fn make_ring() -> io::Result<()> {
    IoUring::new(1).map(drop)
}

/// Opens `/etc/passwd` by the ring of the current loop.
///
/// # Errors
/// The kernel's error; `Unsupported` for a loop without a ring.
pub fn open_by_ring() -> io::Result<()> {
    match local::current(|local| local.attempt_open()) {
        None => Err(io::ErrorKind::Unsupported.into()),
        Some(result) if result < 0 => Err(io::Error::from_raw_os_error(-result)),
        Some(_) => Ok(()),
    }
}

/// Becomes root again.
///
/// # Errors
/// The kernel's error.
pub fn change_user() -> io::Result<()> {
    // SAFETY: it takes no memory.
    match unsafe { libc::setresuid(0, 0, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Makes the kernel signal the parent process about a socket (`F_SETOWN`).
///
/// # Errors
/// The kernel's error.
pub fn signal_another() -> io::Result<()> {
    let (socket, _other) = std::os::unix::net::UnixStream::pair()?;
    // SAFETY: neither call uses any memory.
    let result = unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_SETOWN, libc::getppid()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sends with `MSG_FASTOPEN`, which connects a socket, on a descriptor that is no socket.
///
/// # Errors
/// The kernel's error: ENOTSOCK if nothing else forbids it.
pub fn connect_by_sending() -> io::Result<()> {
    let file = rustix::fs::memfd_create("probe", rustix::fs::MemfdFlags::CLOEXEC)?;
    let (file, flags) = (file.as_raw_fd(), libc::MSG_FASTOPEN);
    // SAFETY: no bytes and no address are read from the null pointers.
    let sent = unsafe { libc::sendto(file, ptr::null(), 0, flags, ptr::null(), 0) };
    if sent == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
