//! The kernel's NBD driver, by generic netlink (`<linux/nbd-netlink.h>`).
//!
//! Guarantee: a function returns when its request is answered, or fails after ten seconds.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::netlink::{GENERIC, SocketAddrNetlink};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with,
};

use crate::error::Error;
use crate::message::{Reply, Request, attribute, replies};

const LIMIT: Duration = Duration::from_secs(10);
/// More bytes than any answer has.
const ANSWER_BYTES: usize = 16 << 10;

/// `GENL_ID_CTRL`, `CTRL_CMD_GETFAMILY` and the attributes of that command.
const CONTROLLER: u16 = 0x10;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;

/// `NBD_CMD_`.
const CONNECT: u8 = 1;
const DISCONNECT: u8 = 2;
/// `NBD_ATTR_`.
const INDEX: u16 = 1;
const SIZE_BYTES: u16 = 2;
const BLOCK_SIZE_BYTES: u16 = 3;
const SERVER_FLAGS: u16 = 5;
const SOCKETS: u16 = 7;
const BACKEND_IDENTIFIER: u16 = 10;
/// `NBD_SOCK_ITEM`, `NBD_SOCK_FD`.
const SOCKET_ITEM: u16 = 1;
const SOCKET_DESCRIPTOR: u16 = 1;

/// A device to create.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    /// The number; `None` for the lowest that is free.
    pub(crate) number: Option<u32>,
    /// Bytes of the export.
    pub(crate) size: u64,
    /// Bytes of a logical block.
    pub(crate) block_size: u64,
    /// The transmission flags of the export.
    pub(crate) flags: u16,
    /// The text for the device's `backend` attribute.
    pub(crate) backend: &'a str,
}

/// The driver.
pub(crate) struct Driver {
    socket: OwnedFd,
    family: u16,
    sequence: u32,
}

impl Driver {
    /// Finds the driver.
    ///
    /// # Errors
    /// [`Error::NoDriver`], or why netlink cannot be used.
    pub(crate) fn open() -> Result<Self, Error> {
        let socket = open_socket().map_err(|error| Error::Unusable(error.into()))?;
        let mut driver = Self { socket, family: CONTROLLER, sequence: 0 };
        let request = driver.request(GET_FAMILY).attribute(FAMILY_NAME, b"nbd\0");
        let found = driver.call(request).map_err(|error| match error.raw_os_error() {
            Some(code) if code == Errno::NOENT.raw_os_error() => Error::NoDriver,
            _ => Error::Unusable(error),
        })?;
        let family =
            find(&found, FAMILY_ID).and_then(|id| Some(u16::from_ne_bytes(id.try_into().ok()?)));
        driver.family = family.ok_or(Error::NoDriver)?;
        Ok(driver)
    }

    /// Creates a device that sends its requests over this socket, which the kernel keeps. Returns
    /// the device's number.
    ///
    /// # Errors
    /// The kernel's: EBUSY if the number is taken, EPERM without rights.
    pub(crate) fn connect(&mut self, wanted: &Wanted<'_>, socket: impl AsFd) -> io::Result<u32> {
        let descriptor = socket.as_fd().as_raw_fd().to_ne_bytes();
        let socket = attribute(SOCKET_DESCRIPTOR, &descriptor);
        let mut request = self.request(CONNECT);
        if let Some(number) = wanted.number {
            request = request.attribute(INDEX, &number.to_ne_bytes());
        }
        let request = request
            .attribute(SIZE_BYTES, &wanted.size.to_ne_bytes())
            .attribute(BLOCK_SIZE_BYTES, &wanted.block_size.to_ne_bytes())
            .attribute(SERVER_FLAGS, &u64::from(wanted.flags).to_ne_bytes())
            .attribute(BACKEND_IDENTIFIER, &[wanted.backend.as_bytes(), b"\0"].concat())
            .nested(SOCKETS, &attribute(SOCKET_ITEM | 1 << 15, &socket));
        let made = self.call(request)?;
        let number =
            find(&made, INDEX).and_then(|id| Some(u32::from_ne_bytes(id.try_into().ok()?)));
        number.ok_or_else(|| io::Error::other("the kernel does not name the device"))
    }

    /// Disconnects a device: requests in flight and later ones fail. Writes that a flush has made
    /// durable before this call are not affected.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn disconnect(&mut self, number: u32) -> io::Result<()> {
        let request = self.request(DISCONNECT).attribute(INDEX, &number.to_ne_bytes());
        self.call(request).map(drop)
    }

    fn request(&mut self, command: u8) -> Request {
        self.sequence += 1;
        Request::new(self.family, command, self.sequence)
    }

    /// Sends the request that was made last. Returns the attributes of the replies.
    fn call(&mut self, request: Request) -> io::Result<Vec<(u16, Vec<u8>)>> {
        let kernel = SocketAddrNetlink::new(0, 0);
        sendto(&self.socket, &request.into_bytes(), SendFlags::empty(), &kernel)?;
        let mut found = Vec::new();
        let mut bytes = vec![0; ANSWER_BYTES];
        loop {
            let (length, _) = match recv(&self.socket, &mut bytes[..], RecvFlags::empty()) {
                Err(Errno::INTR) => continue,
                outcome => outcome?,
            };
            for reply in replies(&bytes[..length], self.sequence) {
                match reply {
                    Reply::Message(attributes) => found.extend(attributes),
                    Reply::End(0) => return Ok(found),
                    Reply::End(code) => return Err(io::Error::from_raw_os_error(code)),
                }
            }
        }
    }
}

fn open_socket() -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(GENERIC))?;
    set_socket_timeout(&socket, Timeout::Recv, Some(LIMIT))?;
    Ok(socket)
}

fn find(attributes: &[(u16, Vec<u8>)], wanted: u16) -> Option<&[u8]> {
    attributes.iter().find(|(kind, _)| *kind == wanted).map(|(_, data)| &data[..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_answers_and_names_its_families() {
        let socket = open_socket().expect("netlink");
        let mut driver = Driver { socket, family: CONTROLLER, sequence: 0 };
        // The controller is itself a family, with this number.
        let request = driver.request(GET_FAMILY).attribute(FAMILY_NAME, b"nlctrl\0");
        let found = driver.call(request).expect("an answer");
        assert_eq!(find(&found, FAMILY_ID), Some(&CONTROLLER.to_ne_bytes()[..]));
        let request = driver.request(GET_FAMILY).attribute(FAMILY_NAME, b"no-such\0");
        let error = driver.call(request).expect_err("there is none");
        assert_eq!(error.raw_os_error(), Some(Errno::NOENT.raw_os_error()));
    }
}
