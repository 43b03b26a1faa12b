//! The messages between a server and its launcher, over a socket pair: a length, then JSON, then a
//! byte that may carry one descriptor.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The maximum length of a message: a command line has at most 2 MiB, and a byte takes up to four
/// bytes in JSON.
const MAX_MESSAGE: u32 = 16 << 20;

/// The server's messages.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// The first message, sent once: the programs that may be started.
    Rules(Rules),
    /// Starts a program; its standard input comes with the message. `None`: the first program of
    /// the rules, or the launcher's own if there is none.
    Start { binary: Option<Vec<u8>> },
    /// Kills the process that was started last, and waits for its end.
    Kill,
    /// Waits for the end of the process that was started last, and kills the process if it does
    /// not end.
    Wait,
    /// Sends a signal to the process that was started last.
    Signal { signal: i32 },
}

/// The programs that may be started.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Rules {
    /// The arguments that each program gets.
    pub(super) arguments: Vec<Vec<u8>>,
    /// The paths of the programs that may be started beside the launcher's own.
    pub(super) programs: Vec<Vec<u8>>,
    /// The paths that the server can write. `programs` must not be there.
    pub(super) reach: ToldReach,
    /// The capabilities that the launcher keeps, a bit for each.
    pub(super) capabilities: u64,
    /// The ids of the user and the group that the launcher becomes first.
    pub(super) user: Option<(u32, u32)>,
}

/// The paths that a server can write.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) enum ToldReach {
    /// All paths that the server's user may write.
    #[default]
    User,
    /// Below these paths.
    Below(Vec<Writable>),
    /// Anywhere: the server is not confined.
    Anywhere,
}

/// A folder or file that a server can write, as it was before the server served any client.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Writable {
    /// The canonical path.
    pub(super) path: Vec<u8>,
    /// The device and inode.
    pub(super) identity: (u64, u64),
}

/// The launcher's replies to all requests except the rules.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    /// The process runs, with this program.
    Started { process: u32, program: Vec<u8> },
    /// No process was started.
    Refused { why: String },
    /// The exit status of the process.
    Ended { status: String },
    /// The request was carried out.
    Done,
}

/// One end of the socket pair.
pub(super) struct Channel(UnixStream);

impl Channel {
    pub(super) fn new(socket: UnixStream) -> Self {
        Self(socket)
    }

    /// Sends a message, then one byte that carries the descriptor if there is one.
    ///
    /// # Errors
    /// The kernel's error: EPIPE if the other end is closed.
    pub(super) fn send(
        &self,
        message: &impl Serialize,
        descriptor: Option<OwnedFd>,
    ) -> io::Result<()> {
        let json = serde_json::to_vec(message)?;
        let length = u32::try_from(json.len()).map_err(io::Error::other)?;
        (&self.0).write_all(&length.to_le_bytes())?;
        (&self.0).write_all(&json)?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let descriptors: Vec<_> = descriptor.iter().map(AsFd::as_fd).collect();
        if !descriptors.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        }
        loop {
            let byte = [IoSlice::new(&[0])];
            match sendmsg(&self.0, &byte, &mut ancillary, SendFlags::NOSIGNAL) {
                Err(Errno::INTR) => {}
                outcome => return outcome.map(drop).map_err(Into::into),
            }
        }
    }

    /// Waits for a message. `None` when the other end is closed.
    ///
    /// # Errors
    /// The kernel's error, or an invalid message.
    pub(super) fn receive<T: DeserializeOwned>(&self) -> io::Result<Option<(T, Option<OwnedFd>)>> {
        let mut length = [0; 4];
        match (&self.0).read_exact(&mut length) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof || is_end(&error) => {
                return Ok(None);
            }
            outcome => outcome?,
        }
        let length = u32::from_le_bytes(length);
        if length > MAX_MESSAGE {
            return Err(io::Error::other(format!("a message of {length} bytes")));
        }
        let mut json = vec![0; length as usize];
        (&self.0).read_exact(&mut json)?;
        let descriptor = self.receive_descriptor()?;
        Ok(Some((serde_json::from_slice(&json)?, descriptor)))
    }

    fn receive_descriptor(&self) -> io::Result<Option<OwnedFd>> {
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let mut byte = [0];
            let parts = &mut [IoSliceMut::new(&mut byte)];
            let received = recvmsg(&self.0, parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC);
            match received {
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
                Ok(received) if received.bytes == 0 => {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                Ok(_) => {}
            }
            let mut descriptor = None;
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(mut came) = message {
                    descriptor = came.next();
                }
            }
            return Ok(descriptor);
        }
    }
}

/// The errors of a connection that the other end has closed.
pub(super) fn is_end(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_whole_with_their_descriptors() {
        let (one, other) = UnixStream::pair().expect("a socket pair");
        let (one, other) = (Channel::new(one), Channel::new(other));
        let (file, _) = UnixStream::pair().expect("a socket pair");
        one.send(&Request::Start { binary: Some(b"/x".to_vec()) }, Some(file.into()))
            .expect("room");
        one.send(&Request::Kill, None).expect("room");
        let (first, descriptor) = other.receive::<Request>().expect("a message").expect("no end");
        assert!(matches!(first, Request::Start { binary: Some(path) } if path == b"/x"));
        assert!(descriptor.is_some());
        let (second, descriptor) = other.receive::<Request>().expect("a message").expect("no end");
        assert!(matches!(second, Request::Kill) && descriptor.is_none());
        drop(one);
        assert!(other.receive::<Request>().expect("the end").is_none());
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let (one, other) = UnixStream::pair().expect("a socket pair");
        (&one).write_all(&[0xff; 64]).expect("room");
        assert!(Channel::new(other).receive::<Request>().is_err());
    }
}
