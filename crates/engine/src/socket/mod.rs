//! Stream sockets of a loop, both Unix and TCP.

pub(crate) mod page_pipe;
pub(crate) mod socket_option;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::task::Context;
use std::time::Duration;

use blockhouse_core::IoVectorList;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use crate::driver::operation::{Message, Operation};
use crate::driver::system_call::try_socket;
use crate::event_loop::sleep::sleep;
use crate::event_loop::submit::{submit, submit_until};
use crate::process::descriptors::{ShortageLog, is_shortage};

/// A connected socket. Clones are the same connection. The socket may move to another loop as long
/// as no operation is in flight. A receive and a send may be in flight at the same time, but not
/// two receives or two sends: it is undefined which of the two transfers which bytes.
#[derive(Clone, Debug)]
pub struct Stream(Arc<OwnedFd>);

impl Stream {
    /// Takes over a connected stream socket.
    ///
    /// # Errors
    /// The kernel's error, if the descriptor cannot be made blocking. The engines need a blocking
    /// socket, and each has its own way to avoid blocking the loop.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, false)?;
        Ok(Self(Arc::new(socket)))
    }

    /// Waits for the first byte, and receives as many available bytes as fit. 0 is the peer's end
    /// of stream. Returns the list unchanged.
    pub async fn receive(&self, into: IoVectorList) -> (io::Result<usize>, IoVectorList) {
        let message = Message { socket: Arc::clone(&self.0), list: into };
        let (result, operation) = submit(Operation::Receive(message)).await;
        (result.map_err(Into::into), list_of(operation))
    }

    /// As [`receive`](Self::receive), until `is_stopped` returns true. If `is_stopped` returns
    /// false, it has registered the task to be woken. After it has returned true, the receive ends
    /// soon: with the bytes that the kernel has taken out of the socket, or, if there are none,
    /// with an error that [`is_stopped`] recognizes. No byte is lost.
    pub async fn receive_until(
        &self,
        into: IoVectorList,
        is_stopped: impl FnMut(&Context<'_>) -> bool,
    ) -> (io::Result<usize>, IoVectorList) {
        let message = Message { socket: Arc::clone(&self.0), list: into };
        let (result, operation) = submit_until(Operation::Receive(message), is_stopped).await;
        (result.map_err(Into::into), list_of(operation))
    }

    /// Sends everything, in order. Returns the list advanced by the bytes sent.
    pub async fn send(&self, mut from: IoVectorList) -> (io::Result<()>, IoVectorList) {
        while !from.is_empty() {
            let (result, rest) = self.send_some(from).await;
            from = rest;
            if result.is_err() {
                return (result, from);
            }
        }
        (Ok(()), from)
    }

    /// Sends as many bytes as the socket accepts at once, in order, waiting until it accepts some.
    /// Returns the list advanced by the bytes sent.
    pub async fn send_some(&self, from: IoVectorList) -> (io::Result<()>, IoVectorList) {
        let message = Message { socket: Arc::clone(&self.0), list: from };
        let (result, operation) = submit(Operation::Send(message)).await;
        let mut from = list_of(operation);
        let result = result.map(|sent| from.advance(sent)).map_err(Into::into);
        (result, from)
    }

    /// As [`send`](Self::send); bytes that the socket accepts without waiting are sent by a
    /// separate system call. That is cheaper if the task then only waits for the peer's answer: the
    /// engine's next system call can sleep until then, and has no completion of the send to report.
    pub async fn send_directly(&self, from: IoVectorList) -> (io::Result<()>, IoVectorList) {
        let operation = Operation::Send(Message { socket: Arc::clone(&self.0), list: from });
        let result = try_socket(&operation);
        let mut from = list_of(operation);
        match usize::try_from(result) {
            Ok(sent) => from.advance(sent),
            Err(_) if result == -libc::EAGAIN => {}
            Err(_) => return (Err(io::Error::from_raw_os_error(-result)), from),
        }
        self.send(from).await
    }

    /// Ends the connection in both directions: its operations in flight complete.
    pub fn shutdown(&self) {
        // The call fails only for a connection that has ended already.
        let _ = rustix::net::shutdown(&*self.0, rustix::net::Shutdown::Both);
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Whether an operation was stopped before it did anything.
pub fn is_stopped(error: &io::Error) -> bool {
    Errno::from_io_error(error) == Some(Errno::CANCELED)
}

/// How long a listener waits before its next attempt after descriptors or memory ran out.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(100);

/// A listening socket. Several loops may accept from clones of it, if all have the same engine:
/// some engines need it to be blocking, others nonblocking.
#[derive(Clone, Debug)]
pub struct Listener {
    socket: Arc<OwnedFd>,
    shortages: Arc<ShortageLog>,
}

impl Listener {
    /// Takes over a listening stream socket.
    ///
    /// # Errors
    /// The errors of [`Stream::new`].
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, false)?;
        Ok(Self { socket: Arc::new(socket), shortages: Arc::default() })
    }

    /// Waits for the next connection. Dropping the future ends the wait; a connection that comes in
    /// at that very moment is closed. Without free descriptors or memory, clients wait in the
    /// kernel's queue, with one warning a minute.
    ///
    /// # Errors
    /// The kernel's error (`accept4(2)`): some, like ECONNABORTED, are about one connection only,
    /// and the next call may succeed.
    pub async fn accept(&self) -> io::Result<Stream> {
        self.accept_until(|_| false).await
    }

    /// As [`accept`](Self::accept), until `is_stopped` returns true. If `is_stopped` returns false,
    /// it has registered the task to be woken. After it has returned true, the wait ends soon: with
    /// a connection that was accepted in that moment, or with an error that [`is_stopped`]
    /// recognizes. No connection is lost.
    ///
    /// # Errors
    /// The errors of [`accept`](Self::accept).
    pub async fn accept_until(
        &self,
        mut is_stopped: impl FnMut(&Context<'_>) -> bool,
    ) -> io::Result<Stream> {
        loop {
            let operation = Operation::Accept { socket: Arc::clone(&self.socket) };
            match submit_until(operation, &mut is_stopped).await.0 {
                Ok(descriptor) => {
                    // SAFETY: the kernel has just made this descriptor for us, and this is its only
                    // owner.
                    let socket = unsafe { OwnedFd::from_raw_fd(descriptor as i32) };
                    // The socket is blocking, as a `Stream` must be: accepted sockets inherit no
                    // flags on Linux.
                    return Ok(Stream(Arc::new(socket)));
                }
                Err(errno) => {
                    let error = io::Error::from(errno);
                    if !is_shortage(&error) {
                        return Err(error);
                    }
                    // The kernel allocates a descriptor before it checks for a client.
                    if self.has_client() {
                        let effect = "a client waits because its connection cannot be accepted";
                        self.shortages.warn(effect, &error);
                    }
                    sleep(SHORTAGE_PAUSE).await;
                }
            }
        }
    }

    /// Whether a connection waits to be accepted.
    fn has_client(&self) -> bool {
        let mut listener = [PollFd::new(&self.socket, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut listener, Some(&now)) == Ok(1)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn list_of(operation: Operation) -> IoVectorList {
    match operation {
        Operation::Receive(message) | Operation::Send(message) => message.list,
        _ => unreachable!("an operation comes back as it went"),
    }
}
