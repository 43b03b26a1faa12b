//! Telling a front-end that the configuration has changed.
//!
//! The library that parses messages takes the socket for that, but has no message to send there. So
//! the socket is taken a look earlier: a message that is peeked at shows its descriptors, too.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg, send};

/// Bytes of a message's header: request, flags, size of what follows.
const HEADER: usize = 12;
/// `VHOST_USER_SET_BACKEND_REQ_FD`.
const SET_SOCKET: u32 = 21;
/// `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`.
const CONFIG_CHANGE: u32 = 2;
/// The version of the protocol, in a message's flags.
const VERSION: u32 = 1;

/// A front-end's socket for messages of ours.
#[derive(Debug)]
pub struct Listener(OwnedFd);

impl Listener {
    /// Waits for the next message on a connection, which stays there. If it brings a socket for our
    /// messages, here it is.
    pub fn peek(connection: &OwnedFd) -> Option<Self> {
        let mut header = [0; HEADER];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::PEEK | RecvFlags::CMSG_CLOEXEC;
        let parts = &mut [IoSliceMut::new(&mut header)];
        let received = recvmsg(connection, parts, &mut ancillary, flags).ok()?;
        let descriptor = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        })?;
        let [a, b, c, d, ..] = header;
        let wanted = received.bytes == HEADER && u32::from_ne_bytes([a, b, c, d]) == SET_SOCKET;
        wanted.then_some(Self(descriptor))
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
