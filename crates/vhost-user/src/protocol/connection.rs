//! A front-end's connection: receives messages with their descriptors, and sends replies.
//!
//! Guarantees: a message is read exactly to its end, in however many pieces it arrives, because
//! descriptors belong to the message whose bytes they came with. If a message stays incomplete, or
//! comes with more than [`MAX_DESCRIPTORS`], the connection ends. A front-end that does not read
//! its replies does not block the server: its connection ends too.
//!
//! Descriptors that come with a request that takes none are never received, so the kernel closes
//! them. Reason: if this process closed the descriptor of a FUSE file, it would wait for the file's
//! daemon, which may not answer, and no signal interrupts that wait. For example, front-ends send a
//! descriptor with `REM_MEM_REG`.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use blockhouse_engine::wait_readable;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recv, recvmsg, sendmsg,
};

use super::numbers::{HEADER_BYTES, VERSION, VERSION_MASK, takes_descriptors};

/// Maximum bytes of a payload. The longest supported message, a table of 32 regions, needs about a
/// quarter of that.
const MAX_PAYLOAD: usize = 4096;

/// Maximum descriptors of a message: one for each region of `SET_MEM_TABLE`.
pub const MAX_DESCRIPTORS: usize = 32;

/// How long a message may take from its first bytes to its last. Front-ends send whole messages.
/// Without the limit, a front-end that stops in the middle of a message would block the device and
/// keep the received descriptors open forever.
const MAX_MESSAGE_TIME: Duration = Duration::from_secs(10);

/// `VHOST_USER_REPLY_MASK`, `VHOST_USER_NEED_REPLY_MASK`.
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// A message of a front-end.
#[derive(Debug)]
pub struct Message {
    /// The type of the request.
    pub request: u32,
    /// Whether the front-end waits for an acknowledgement if the request has no reply of its own.
    pub needs_reply: bool,
    /// The bytes after the header.
    pub payload: Vec<u8>,
    /// The descriptors that came with the message.
    pub descriptors: Vec<OwnedFd>,
}

/// The connection of a front-end. Only reading blocks the thread.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    /// The time limit of a message: [`MAX_MESSAGE_TIME`].
    message_time: Duration,
}

/// The event that ended a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// A message, the first part of one, or the connection's end.
    Message,
    /// The other descriptor is readable.
    Other,
}

/// The part of a message that was received so far.
#[derive(Default)]
struct Partial {
    descriptors: Vec<OwnedFd>,
    /// The time by which the rest must have arrived; `None` before the first bytes.
    deadline: Option<Instant>,
    /// Whether the message's request takes descriptors; `None` before that is known.
    takes_descriptors: Option<bool>,
}

fn invalid(what: impl Into<String>) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what.into())
}

impl Connection {
    /// A connection by this socket.
    pub fn new(stream: UnixStream) -> Self {
        Self { stream, message_time: MAX_MESSAGE_TIME }
    }

    /// The socket.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Waits until there is something to [`receive`](Self::receive), or `other` is readable. If
    /// both are true, returns [`Arrival::Message`].
    ///
    /// # Errors
    /// The kernel's.
    pub fn wait(&self, other: BorrowedFd<'_>) -> io::Result<Arrival> {
        loop {
            let mut polled =
                [PollFd::new(&self.stream, PollFlags::IN), PollFd::new(&other, PollFlags::IN)];
            match poll(&mut polled, None) {
                Ok(_) if !polled[0].revents().is_empty() => return Ok(Arrival::Message),
                Ok(_) => return Ok(Arrival::Other),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits for the next message. `None` when the front-end has closed the connection.
    ///
    /// # Errors
    /// The kernel's; `InvalidData` when no further message can be parsed: an invalid header, a
    /// payload of more than 4096 bytes, an end in the middle, lost descriptors; also for a message
    /// with more than [`MAX_DESCRIPTORS`]. `TimedOut` when a message is incomplete 10 seconds after
    /// its first bytes.
    pub fn receive(&self) -> io::Result<Option<Message>> {
        let mut partial = Partial::default();
        let mut header = [0; HEADER_BYTES];
        match self.fill(&mut header, &mut partial)? {
            0 => return Ok(None),
            HEADER_BYTES => {}
            count => return Err(invalid(format!("{count} bytes of a header, then the end"))),
        }
        let word = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|byte| header[at + byte]));
        let (request, flags, length) = (word(0), word(4), word(8) as usize);
        if flags & VERSION_MASK != VERSION || flags & REPLY != 0 {
            return Err(invalid(format!("no header of a request: flags {flags:#x}")));
        }
        if length > MAX_PAYLOAD {
            return Err(invalid(format!("request {request} with a payload of {length} bytes")));
        }
        let mut payload = vec![0; length];
        let count = self.fill(&mut payload, &mut partial)?;
        if count < length {
            let what = format!("request {request}: {count} bytes of {length}, then the end");
            return Err(invalid(what));
        }
        let needs_reply = flags & NEED_REPLY != 0;
        Ok(Some(Message { request, needs_reply, payload, descriptors: partial.descriptors }))
    }

    /// Reads until the buffer is full, or to the connection's end. Returns the count of bytes.
    fn fill(&self, buffer: &mut [u8], partial: &mut Partial) -> io::Result<usize> {
        let mut filled = 0;
        while filled < buffer.len() {
            self.wait_until(partial.deadline)?;
            if partial.takes_descriptors.is_none() {
                partial.takes_descriptors = self.peek()?.map(takes_descriptors);
            }
            let mut space =
                [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
            let mut ancillary = match partial.takes_descriptors {
                Some(true) => RecvAncillaryBuffer::new(&mut space),
                Some(false) | None => RecvAncillaryBuffer::default(),
            };
            let parts = &mut [IoSliceMut::new(&mut buffer[filled..])];
            match recvmsg(&self.stream, parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                Ok(received) => {
                    for message in ancillary.drain() {
                        if let RecvAncillaryMessage::ScmRights(came) = message {
                            partial.descriptors.extend(came);
                        }
                    }
                    let is_lost = received.flags.contains(ReturnFlags::CTRUNC);
                    if is_lost && partial.takes_descriptors.is_none() {
                        return Err(invalid("descriptors before the number of a request"));
                    }
                    if is_lost && partial.takes_descriptors == Some(true) {
                        return Err(invalid(
                            "descriptors were lost: too many in one message, or open in this process",
                        ));
                    }
                    // The kernel limits only the descriptors of each piece, so the descriptors of a
                    // message in many pieces have to be counted here.
                    let count = partial.descriptors.len();
                    if count > MAX_DESCRIPTORS {
                        return Err(invalid(format!("a message with {count} descriptors")));
                    }
                    if received.bytes == 0 {
                        break;
                    }
                    filled += received.bytes;
                    let deadline = || Instant::now() + self.message_time;
                    partial.deadline.get_or_insert_with(deadline);
                }
                Err(Errno::INTR) => {}
                // The front-end closed the connection without reading everything.
                Err(Errno::CONNRESET) => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(filled)
    }

    /// The number of the next request; `None` if its bytes have not arrived yet, or no request
    /// comes. Waits for the first byte.
    fn peek(&self) -> io::Result<Option<u32>> {
        let mut request = [0; 4];
        loop {
            match recv(&self.stream, &mut request, RecvFlags::PEEK) {
                Ok((_, count)) => return Ok((count == 4).then(|| u32::from_ne_bytes(request))),
                Err(Errno::INTR) => {}
                // The next read reports the end again.
                Err(Errno::CONNRESET) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits for bytes, or the end, until the deadline if there is one.
    fn wait_until(&self, deadline: Option<Instant>) -> io::Result<()> {
        let Some(deadline) = deadline else { return Ok(()) };
        if wait_readable(&self.stream, deadline)? {
            return Ok(());
        }
        let what = format!("a message is incomplete after {:?}", self.message_time);
        Err(io::Error::new(ErrorKind::TimedOut, what))
    }

    /// Replies to a request.
    ///
    /// # Errors
    /// Errors of the kernel; `WouldBlock` if replies that the front-end has not read fill the
    /// socket.
    pub fn reply(
        &self,
        request: u32,
        payload: &[u8],
        descriptor: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES + payload.len());
        for word in [request, VERSION | REPLY, payload.len() as u32] {
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
        bytes.extend_from_slice(payload);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let descriptors = descriptor.as_slice();
        if !descriptors.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let sent = loop {
            match sendmsg(&self.stream, &[IoSlice::new(&bytes)], &mut ancillary, flags) {
                Err(Errno::INTR) => {}
                outcome => break outcome?,
            }
        };
        if sent == bytes.len() { Ok(()) } else { Err(ErrorKind::WouldBlock.into()) }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;

    use super::*;

    fn pair() -> (Connection, UnixStream) {
        let (here, there) = UnixStream::pair().unwrap();
        (Connection::new(here), there)
    }

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    #[test]
    fn a_message_comes_in_any_number_of_pieces() {
        let (connection, mut peer) = pair();
        let sender = std::thread::spawn(move || {
            for byte in words(&[7, VERSION | NEED_REPLY, 8, 1, 2]) {
                peer.write_all(&[byte]).unwrap();
            }
        });
        let message = connection.receive().unwrap().unwrap();
        assert_eq!((message.request, message.needs_reply), (7, true));
        assert_eq!(message.payload, words(&[1, 2]));
        sender.join().unwrap();
        assert!(connection.receive().unwrap().is_none(), "it left");
    }

    fn file() -> OwnedFd {
        rustix::fs::memfd_create("sent", rustix::fs::MemfdFlags::CLOEXEC).unwrap()
    }

    fn send_with(peer: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
        }
        sendmsg(peer, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::empty()).unwrap();
    }

    #[test]
    fn a_message_in_pieces_has_no_more_descriptors_than_a_whole_one() {
        let (connection, peer) = pair();
        let (file, message) = (file(), words(&[5, VERSION, 8, 9, 9]));
        let (first, rest) = message.split_at(4);
        send_with(&peer, first, &[file.as_fd(); MAX_DESCRIPTORS]);
        send_with(&peer, rest, &[]);
        let received = connection.receive().unwrap().unwrap();
        assert_eq!(received.descriptors.len(), MAX_DESCRIPTORS);
        send_with(&peer, first, &[file.as_fd(); 2]);
        for byte in rest {
            send_with(&peer, &[*byte], &[file.as_fd(); 2]);
        }
        let error = connection.receive().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
        assert!(error.to_string().contains("34 descriptors"), "{error}");
    }

    #[test]
    fn a_message_that_stays_incomplete_ends_the_connection() {
        let message = words(&[5, VERSION, 4, 9]);
        for sent in [1, HEADER_BYTES, HEADER_BYTES + 1] {
            let (mut connection, mut peer) = pair();
            connection.message_time = Duration::from_millis(20);
            peer.write_all(&message[..sent]).unwrap();
            assert_eq!(connection.receive().unwrap_err().kind(), ErrorKind::TimedOut, "{sent}");
        }
    }

    #[test]
    fn descriptors_come_with_the_message_that_they_belong_to() {
        let (connection, peer) = pair();
        let file = file();
        let message = words(&[5, VERSION, 4, 9]);
        let send = |bytes: &[u8], descriptors: &[BorrowedFd<'_>]| {
            send_with(&peer, bytes, descriptors);
        };
        // With the header, with the payload, with none.
        send(&message, &[file.as_fd(), file.as_fd()]);
        send(&message[..HEADER_BYTES], &[]);
        send(&message[HEADER_BYTES..], &[file.as_fd()]);
        send(&message, &[]);
        for count in [2, 1, 0] {
            assert_eq!(connection.receive().unwrap().unwrap().descriptors.len(), count);
        }
    }

    #[test]
    fn descriptors_that_no_request_takes_never_become_this_processs() {
        let (connection, peer) = pair();
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        // REM_MEM_REG, GET_FEATURES, and an unknown one.
        for request in [38, 1, 1000] {
            let message = words(&[request, VERSION, 4, 9]);
            for (first, rest) in [message.split_at(4), message.split_at(HEADER_BYTES)] {
                send_with(&peer, first, &[writer.as_fd(); 3]);
                send_with(&peer, rest, &[writer.as_fd()]);
                assert!(connection.receive().unwrap().unwrap().descriptors.is_empty());
            }
        }
        drop(writer);
        assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Ok(0), "nothing has it open");
        let file = file();
        send_with(&peer, &[5], &[file.as_fd()]);
        let error = connection.receive().unwrap_err();
        assert!(error.to_string().contains("before the number"), "{error}");
    }

    #[test]
    fn what_is_no_message_is_an_error() {
        for bytes in [
            words(&[1, 0, 0]),
            words(&[1, 2, 0]),
            words(&[1, VERSION | REPLY, 0]),
            words(&[1, VERSION, MAX_PAYLOAD as u32 + 1]),
            words(&[1, VERSION, 8, 0]),
            words(&[1, VERSION]),
        ] {
            let (connection, mut peer) = pair();
            peer.write_all(&bytes).unwrap();
            drop(peer);
            assert_eq!(connection.receive().unwrap_err().kind(), ErrorKind::InvalidData);
        }
    }

    #[test]
    fn a_front_end_that_reads_nothing_blocks_no_thread() {
        let (connection, _peer) = pair();
        let error = (0..1 << 20).find_map(|_| connection.reply(1, &[0; 256], None).err());
        assert_eq!(error.unwrap().kind(), ErrorKind::WouldBlock);
    }
}
