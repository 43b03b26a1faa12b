//! The back-end's own channel: the socket that a front-end provides for messages from the back-end
//! (`VHOST_USER_SET_BACKEND_REQ_FD`).

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::sockopt::socket_domain;
use rustix::net::{AddressFamily, SendFlags, send};

use super::numbers::{HEADER_BYTES, VERSION};

/// `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`.
const CONFIG_CHANGE: u32 = 2;

/// A front-end's socket for messages to it.
#[derive(Debug)]
pub struct BackendChannel(OwnedFd);

impl BackendChannel {
    /// A channel by this socket.
    ///
    /// # Errors
    /// `InvalidInput` if the descriptor is not a Unix socket.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        match socket_domain(&socket) {
            Ok(AddressFamily::UNIX) => Ok(Self(socket)),
            _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "this is no Unix socket")),
        }
    }

    /// Another handle of the socket.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub fn duplicate(&self) -> io::Result<OwnedFd> {
        self.0.try_clone()
    }

    /// Notifies the front-end that the configuration has changed. Requests no acknowledgement,
    /// because the device would wait for it while the front-end waits for a reply of the device,
    /// which is a deadlock.
    ///
    /// # Errors
    /// Errors of the kernel; `WouldBlock` if the front-end does not read its messages.
    pub fn notify_config_change(&self) -> io::Result<()> {
        let mut message = [0; HEADER_BYTES];
        message[..4].copy_from_slice(&CONFIG_CHANGE.to_ne_bytes());
        message[4..8].copy_from_slice(&VERSION.to_ne_bytes());
        send(&self.0, &message, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
        Ok(())
    }
}
