//! Frames with descriptors over a socket pair. `format` defines them.
//!
//! Guarantees: a read never goes beyond the end of a frame, because the kernel delivers descriptors
//! with the bytes that they were sent with. No call waits beyond its deadline. Lengths from the
//! other process are checked before memory is allocated for them.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use blockhouse_engine::wait_readable;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, recvmsg, sendmsg, shutdown, sockopt,
};

use super::format::{BATCH, HEADER_BYTES, MAGIC, Message, VERSION};

/// The maximum number of bytes of JSON in a frame.
const MAX_JSON: u64 = 64 << 20;
/// The maximum number of bytes after the JSON: every connection can have a request of the largest
/// size in flight.
const MAX_BYTES: u64 = 16 << 30;
/// The maximum number of descriptors in a frame.
const MAX_DESCRIPTORS: u32 = 1 << 20;

/// Memory is allocated in parts of this many bytes as they arrive, not for the announced length at
/// once.
const PART: u64 = 1 << 20;

/// How long a send may wait while the other process reads nothing.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);

/// One end of the socket pair.
pub struct Channel {
    socket: OwnedFd,
    version: u32,
}

/// A message and its descriptors.
pub struct Frame {
    /// The message.
    pub message: Message,
    /// The descriptors that came with it.
    pub descriptors: Vec<OwnedFd>,
    /// The bytes that came with it.
    pub bytes: Vec<u8>,
}

impl Channel {
    /// A channel over this socket that uses this version of the format.
    ///
    /// # Errors
    /// The kernel's error, if the descriptor is not a socket.
    pub fn new(socket: OwnedFd, version: u32) -> io::Result<Self> {
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(SEND_TIMEOUT))?;
        Ok(Self { socket, version })
    }

    /// Sends a frame.
    ///
    /// # Errors
    /// The kernel's error: EPIPE if the other process has ended.
    pub fn send(
        &self,
        message: &Message,
        descriptors: &[BorrowedFd<'_>],
        bytes: &[u8],
    ) -> io::Result<()> {
        let json = serde_json::to_vec(message)?;
        let count = u32::try_from(descriptors.len()).map_err(io::Error::other)?;
        let mut header = [0; HEADER_BYTES];
        header[..8].copy_from_slice(&MAGIC);
        header[8..12].copy_from_slice(&self.version.to_le_bytes());
        header[12..16].copy_from_slice(&count.to_le_bytes());
        header[16..24].copy_from_slice(&(json.len() as u64).to_le_bytes());
        header[24..].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
        self.send_all(&header, &[])?;
        for batch in descriptors.chunks(BATCH) {
            self.send_all(&[0], batch)?;
        }
        self.send_all(&json, &[])?;
        self.send_all(bytes, &[])
    }

    /// Refuses all further messages of the other process, and tells it why. Messages that were sent
    /// before can still be received.
    ///
    /// # Errors
    /// The kernel's error: the other process may not learn of it.
    pub fn refuse(&self, why: &str) -> io::Result<()> {
        shutdown(&self.socket, Shutdown::Read)?;
        match self.send(&Message::Refused { why: why.to_owned() }, &[], &[]) {
            // The other process has ended.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
            outcome => outcome,
        }
    }

    /// Ends the stream in both directions. A message of which a part was sent stays incomplete.
    pub fn close(&self) {
        // An error means that the other process has closed the stream.
        let _ = shutdown(&self.socket, Shutdown::Both);
    }

    fn send_all(&self, mut bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        while !bytes.is_empty() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !descriptors.is_empty() {
                ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
            }
            let parts = [IoSlice::new(bytes)];
            match sendmsg(&self.socket, &parts, &mut ancillary, SendFlags::NOSIGNAL) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Waits for the next frame until the deadline, if there is one. `None` when the other process
    /// has ended.
    ///
    /// # Errors
    /// The kernel's error; `TimedOut` at the deadline; another version of the format; an invalid
    /// frame.
    pub fn receive(&self, deadline: Option<Instant>) -> Result<Option<Frame>> {
        let mut header = [0; HEADER_BYTES];
        if !self.fill(&mut header, &mut Vec::new(), deadline)? {
            return Ok(None);
        }
        if header[..8] != MAGIC {
            bail!("what came is no frame of a hand-over");
        }
        let version = u32::from_le_bytes(array(&header, 8));
        if version != self.version {
            bail!(
                "the other server speaks version {version} of the hand-over's format, this one version \
                 {}; restart instead",
                self.version
            );
        }
        let count = u32::from_le_bytes(array(&header, 12));
        let (json, bytes) =
            (u64::from_le_bytes(array(&header, 16)), u64::from_le_bytes(array(&header, 24)));
        if count > MAX_DESCRIPTORS || json > MAX_JSON || bytes > MAX_BYTES {
            bail!("a frame of {json} and {bytes} bytes with {count} descriptors");
        }
        let mut descriptors = Vec::new();
        let mut incomplete = false;
        while descriptors.len() < count as usize && !incomplete {
            let before = descriptors.len();
            incomplete = !self.fill(&mut [0], &mut descriptors, deadline)?;
            if descriptors.len() == before {
                bail!("descriptors were lost: too many may be open in this process");
            }
        }
        if incomplete || descriptors.len() != count as usize {
            return Ok(None);
        }
        let Some(text) = self.take(json, deadline)? else { return Ok(None) };
        let Some(rest) = self.take(bytes, deadline)? else { return Ok(None) };
        let message = serde_json::from_slice(&text).context("cannot understand what came")?;
        Ok(Some(Frame { message, descriptors, bytes: rest }))
    }

    /// Reads this many bytes, and allocates memory as they arrive. `None` at the end of the stream.
    fn take(&self, length: u64, deadline: Option<Instant>) -> io::Result<Option<Vec<u8>>> {
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < length {
            let from = bytes.len();
            bytes.resize(from + (length - from as u64).min(PART) as usize, 0);
            if !self.fill(&mut bytes[from..], &mut Vec::new(), deadline)? {
                return Ok(None);
            }
        }
        Ok(Some(bytes))
    }

    /// Reads until the buffer is full. False at the end of the stream.
    fn fill(
        &self,
        buffer: &mut [u8],
        descriptors: &mut Vec<OwnedFd>,
        deadline: Option<Instant>,
    ) -> io::Result<bool> {
        let mut filled = 0;
        while filled < buffer.len() {
            self.wait_until(deadline)?;
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let parts = &mut [IoSliceMut::new(&mut buffer[filled..])];
            match recvmsg(&self.socket, parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                Ok(received) => {
                    for message in ancillary.drain() {
                        if let RecvAncillaryMessage::ScmRights(came) = message {
                            descriptors.extend(came);
                        }
                    }
                    if received.flags.contains(ReturnFlags::CTRUNC) {
                        let what = "descriptors were lost: too many are open in this process";
                        return Err(io::Error::other(what));
                    }
                    if received.bytes == 0 {
                        return Ok(false);
                    }
                    filled += received.bytes;
                }
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }

    fn wait_until(&self, deadline: Option<Instant>) -> io::Result<()> {
        let Some(deadline) = deadline else { return Ok(()) };
        if wait_readable(&self.socket, deadline)? {
            Ok(())
        } else {
            Err(ErrorKind::TimedOut.into())
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The version of the format that this program uses.
pub fn version() -> u32 {
    super::fault::version().unwrap_or(VERSION)
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn pair() -> (Channel, Channel) {
        let (one, other) = UnixStream::pair().expect("a socket pair");
        let channel = |socket: UnixStream| Channel::new(socket.into(), 1).expect("a socket");
        (channel(one), channel(other))
    }

    #[test]
    fn frames_come_with_their_descriptors_and_bytes() {
        let (one, other) = pair();
        let files: Vec<_> = (0..300).map(|_| tempfile::tempfile().expect("a file")).collect();
        let bytes: Vec<u8> = (0..3_000_000).map(|at| at as u8).collect();
        let sent = bytes.clone();
        let sender = std::thread::spawn(move || {
            let borrowed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
            one.send(&Message::Mine, &borrowed, &sent).expect("room");
            one.send(&Message::Ready, &[], &[]).expect("room");
            files
        });
        let frame = other.receive(None).expect("a frame").expect("no end");
        let identity = |file: BorrowedFd<'_>| rustix::fs::fstat(file).expect("open").st_ino;
        let second = other.receive(None).expect("a frame").expect("no end");
        let files = sender.join().expect("it sends");
        assert!((frame.message, frame.bytes) == (Message::Mine, bytes));
        let came: Vec<_> = frame.descriptors.iter().map(|file| identity(file.as_fd())).collect();
        assert_eq!(came, files.iter().map(|file| identity(file.as_fd())).collect::<Vec<_>>());
        assert!(second.message == Message::Ready && second.descriptors.is_empty());
        assert!(other.receive(None).expect("the end").is_none());
    }

    #[test]
    fn another_version_a_deadline_and_nonsense_are_told() {
        let (one, other) = pair();
        let refusal = |channel: &Channel| match channel.receive(Some(Instant::now())) {
            Ok(_) => panic!("that was accepted"),
            Err(error) => format!("{error:#}"),
        };
        assert!(refusal(&other).contains("timed out"));
        let newer =
            Channel { socket: one.socket.try_clone().expect("a copy"), version: VERSION + 1 };
        newer.send(&Message::Ready, &[], &[]).expect("room");
        assert!(refusal(&other).contains(&format!("version {}", VERSION + 1)));
        // The exact bytes of offers from servers of older versions.
        let offers: [&[u8]; 4] = [
            include_bytes!("format/offer_of_version_1"),
            include_bytes!("format/offer_of_version_2"),
            include_bytes!("format/offer_of_version_3"),
            include_bytes!("format/offer_of_version_4"),
        ];
        for (version, old) in (1..).zip(offers) {
            let (one, other) = UnixStream::pair().expect("a socket pair");
            std::io::Write::write_all(&mut &one, old).expect("room");
            let channel = Channel::new(other.into(), VERSION).expect("a socket");
            let why = format!(
                "the other server speaks version {version} of the hand-over's format, this one version {VERSION}; restart instead"
            );
            assert_eq!(refusal(&channel), why);
        }
        let (one, other) = pair();
        one.send_all(&[7; HEADER_BYTES], &[]).expect("room");
        assert!(refusal(&other).contains("no frame"));
    }
}
