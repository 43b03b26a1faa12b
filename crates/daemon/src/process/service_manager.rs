//! Messages to the service manager (sd_notify(3)) through a socket that is created at the start,
//! and descriptors that the manager keeps.
//!
//! Reason: a server in its sandbox cannot create this socket. Guarantee: a lost message has no
//! effect on the server, and a manager that does not receive delays the server by
//! [`MAX_SEND_TIME`] for each, or twice that if signals arrive. Without a manager nothing is sent.

use std::ffi::OsStr;
use std::fmt::Write;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixDatagram;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, sendmsg_addr,
};
use sd_notify::NotifyState;

/// How long a message waits for room in the manager's queue. Reason: a lost `READY=1` would end the
/// server.
const MAX_SEND_TIME: Duration = Duration::from_secs(5);

/// The socket and the manager's address; `None` without a manager.
static MANAGER: OnceLock<Option<(UnixDatagram, SocketAddrUnix)>> = OnceLock::new();

/// Makes the socket, if there is a manager.
pub(crate) fn prepare() {
    MANAGER.get_or_init(|| manager(&std::env::var_os("NOTIFY_SOCKET")?));
}

fn manager(name: &OsStr) -> Option<(UnixDatagram, SocketAddrUnix)> {
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddrUnix::new_abstract_name(name),
        None => SocketAddrUnix::new(name),
    };
    let socket = UnixDatagram::unbound().ok()?;
    socket.set_write_timeout(Some(MAX_SEND_TIME)).ok()?;
    Some((socket, address.ok()?))
}

/// Sends states to the manager.
pub(crate) fn tell(states: &[NotifyState<'_>]) {
    let mut message = String::new();
    for state in states {
        // Writing to a string does not fail.
        let _ = writeln!(message, "{state}");
    }
    send(&message, &[]);
}

/// Whether the manager keeps descriptors for the next process (`FileDescriptorStoreMax=`). systemd
/// reports this since version 254.
pub(crate) fn has_store() -> bool {
    let size = std::env::var("FDSTORE").ok().and_then(|size| size.parse::<u64>().ok());
    size.is_some_and(|size| size > 0) && MANAGER.get().is_some_and(Option::is_some)
}

/// Asks the manager to keep a descriptor under a name until [`forget`]. The manager does not keep
/// the same descriptor twice. Returns whether the message was sent.
pub(crate) fn store(name: &str, descriptor: BorrowedFd<'_>) -> bool {
    send(&format!("FDSTORE=1\nFDNAME={name}\n"), &[descriptor])
}

/// Makes the manager close the descriptors that it keeps under a name.
pub(crate) fn forget(name: &str) {
    send(&format!("FDSTOREREMOVE=1\nFDNAME={name}\n"), &[]);
}

/// Sends a message with descriptors. Returns whether it was sent: a manager that does not listen is
/// no error.
fn send(message: &str, descriptors: &[BorrowedFd<'_>]) -> bool {
    let Some(Some((socket, address))) = MANAGER.get() else { return false };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return false;
    }
    let bytes = [IoSlice::new(message.as_bytes())];
    let deadline = Instant::now() + MAX_SEND_TIME;
    loop {
        match sendmsg_addr(socket, address, &bytes, &mut control, SendFlags::NOSIGNAL) {
            // With a timeout the kernel does not restart the call after a signal.
            Err(Errno::INTR) if Instant::now() < deadline => {}
            sent => return sent.is_ok(),
        }
    }
}
