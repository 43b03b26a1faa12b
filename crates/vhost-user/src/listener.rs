//! Telling a front-end that the configuration has changed, at the socket that it sent for messages of
//! ours (`VHOST_USER_SET_BACKEND_REQ_FD`).

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::sockopt::socket_domain;
use rustix::net::{AddressFamily, SendFlags, send};

/// Bytes of a message's header: request, flags, size of what follows.
const HEADER: usize = 12;
/// `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`.
const CONFIG_CHANGE: u32 = 2;
/// The version of the protocol, in a message's flags.
const VERSION: u32 = 1;

/// A front-end's socket for messages of ours.
#[derive(Debug)]
pub struct Listener(OwnedFd);

impl Listener {
    /// Takes a socket over.
    ///
    /// # Errors
    /// `InvalidInput` when it is no Unix socket.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        match socket_domain(&socket) {
            Ok(AddressFamily::UNIX) => Ok(Self(socket)),
            _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "this is no Unix socket")),
        }
    }

    /// Tells it that the configuration has changed. No answer is asked for: it would have to be waited
    /// for while the front-end waits for one of ours.
    ///
    /// # Errors
    /// The kernel's; a front-end that does not read what it is told is one as well.
    pub fn tell(&self) -> io::Result<()> {
        let mut message = [0; HEADER];
        message[..4].copy_from_slice(&CONFIG_CHANGE.to_ne_bytes());
        message[4..8].copy_from_slice(&VERSION.to_ne_bytes());
        send(&self.0, &message, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
        Ok(())
    }
}
