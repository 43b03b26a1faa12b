//! Queries of sockets that rustix does not have, or has with a type that is too narrow.
//!
//! Guarantee: a value from the kernel is read into a type that can hold all its bit patterns.
//! Reason: rustix reads a PID as not zero, and the kernel returns 0 for a process without a PID in
//! this namespace.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// PID of the process at the other end of a connected Unix socket (`SO_PEERCRED`, unix(7)), in this
/// process's PID namespace. `None` if the peer has no PID there.
///
/// # Errors
/// The kernel's error (`getsockopt(2)`).
pub fn peer_process(socket: impl AsFd) -> io::Result<Option<i32>> {
    let mut credentials = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `credentials` and `length` outlive the call, and the kernel keeps no pointer to them.
    // It writes at most `length` bytes, the size of `credentials`, all of whose bit patterns are
    // valid.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((credentials.pid > 0).then_some(credentials.pid))
}

/// Bytes in the send queue of a stream socket (`SIOCOUTQ`). For TCP: the bytes that the peer has
/// not acknowledged (tcp(7)). For a Unix socket: the memory of the buffers that the peer has not
/// read; the kernel frees a buffer, of up to 36 KiB, when all of it is read.
///
/// # Errors
/// The kernel's error (`ioctl(2)`).
pub fn unsent_bytes(socket: impl AsFd) -> io::Result<usize> {
    let mut count: libc::c_int = 0;
    // SAFETY: TIOCOUTQ, which is SIOCOUTQ on sockets, writes one `int` to `count`, which is live
    // for the call.
    let result = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut count) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(usize::try_from(count).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn unsent_bytes_are_those_that_the_peer_did_not_receive() {
        let (mut one, mut other) = UnixStream::pair().unwrap();
        assert_eq!(unsent_bytes(&one).unwrap(), 0);
        one.write_all(&[1; 4096]).unwrap();
        assert!(unsent_bytes(&one).unwrap() >= 4096);
        other.read_exact(&mut [0; 4096]).unwrap();
        assert_eq!(unsent_bytes(&one).unwrap(), 0);
    }

    #[test]
    fn a_peer_without_a_pid_in_this_namespace_is_none() {
        let (one, _other) = UnixStream::pair().unwrap();
        let own = i32::try_from(std::process::id()).unwrap();
        assert_eq!(peer_process(&one).unwrap(), Some(own));
        // Without a peer the kernel returns 0, as for a peer that has no PID in this namespace.
        let alone = rustix::net::socket(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            None,
        );
        assert_eq!(peer_process(alone.unwrap()).unwrap(), None);
    }
}
