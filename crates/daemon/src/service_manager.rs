//! Messages to the service manager (sd_notify(3)), by a socket that is made at the start.
//!
//! Reason: a server in its sandbox makes no socket. Guarantee: a message that the manager does not take costs nothing,
//! and without a manager nothing is sent.

use std::ffi::OsStr;
use std::fmt::Write;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::OnceLock;

use sd_notify::NotifyState;

/// The socket and the manager's address; `None` without a manager.
static MANAGER: OnceLock<Option<(UnixDatagram, SocketAddr)>> = OnceLock::new();

/// Makes the socket, if there is a manager.
pub(crate) fn prepare() {
    MANAGER.get_or_init(|| manager(&std::env::var_os("NOTIFY_SOCKET")?));
}

fn manager(name: &OsStr) -> Option<(UnixDatagram, SocketAddr)> {
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(name),
    };
    Some((UnixDatagram::unbound().ok()?, address.ok()?))
}

/// Tells the manager.
pub(crate) fn tell(states: &[NotifyState<'_>]) {
    let Some(Some((socket, address))) = MANAGER.get() else { return };
    let mut message = String::new();
    for state in states {
        // Writing to a string does not fail.
        let _ = writeln!(message, "{state}");
    }
    // A manager that does not listen is no reason to do anything else.
    let _ = socket.send_to_addr(message.as_bytes(), address);
}
