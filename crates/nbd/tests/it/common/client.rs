//! The shared NBD client, with this crate's own types for flags, framings and outcomes.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use blockhouse_nbd::proto::request::kind;
use blockhouse_nbd::proto::{CommandFlags, Framing};
use lab_nbd::handshake::{self, OptionReply};
use lab_nbd::{Greeted, Request, is_closed, reply};

/// No flags.
pub const NONE: CommandFlags = CommandFlags::empty();

/// A connection.
pub struct Client(lab_nbd::Client<UnixStream>);

/// A reply.
#[derive(Debug, PartialEq, Eq)]
pub struct Reply {
    pub cookie: u64,
    pub outcome: Outcome,
}

/// The outcome.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    Data(Vec<u8>),
    /// Lengths and flags.
    Status(Vec<(u64, u64)>),
    Error(u32),
}

impl Client {
    /// Connects, and reads the greeting.
    pub fn knock(path: &Path) -> UnixStream {
        let mut stream = UnixStream::connect(path).unwrap();
        // No test waits longer than this for anything.
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        stream
    }

    /// Connects to an export with the given framing, and with block status where that is possible.
    pub fn connect(path: &Path, framing: Framing, export: &str) -> Self {
        let mut stream = Self::knock(path);
        stream.write_all(&3u32.to_be_bytes()).unwrap();
        let framing = match framing {
            Framing::Simple => lab_nbd::Framing::Simple,
            Framing::Structured => lab_nbd::Framing::Structured,
            Framing::Extended => lab_nbd::Framing::Extended,
        };
        Self(Greeted(stream).go(export, framing))
    }

    /// The connection itself.
    pub fn stream(&mut self) -> &mut UnixStream {
        &mut self.0.socket
    }

    /// The size that the server announced.
    pub fn size(&self) -> u64 {
        self.0.size()
    }

    /// How requests and replies look.
    pub fn framing(&self) -> lab_nbd::Framing {
        self.0.framing()
    }

    /// The transmission flags that it announced.
    pub fn flags(&self) -> u16 {
        self.0.flags()
    }

    /// Sends a request; the answer is its cookie.
    pub fn send(&mut self, kind: u16, flags: CommandFlags, offset: u64, length: u64) -> u64 {
        let bytes = self.encode(kind, flags, offset, length);
        self.0.socket.write_all(&bytes).unwrap();
        self.0.last_cookie()
    }

    /// A request as bytes, and a note to expect its reply.
    pub fn encode(&mut self, kind: u16, flags: CommandFlags, offset: u64, length: u64) -> Vec<u8> {
        self.0.encode(Request { command: kind, flags: flags.bits(), offset, length })
    }

    /// Sends a write.
    pub fn write(&mut self, flags: CommandFlags, offset: u64, data: &[u8]) -> u64 {
        let (flags, length) = (flags.bits(), data.len() as u64);
        let request = Request { command: kind::WRITE, flags, offset, length };
        self.0.send_with(request, data).unwrap()
    }

    /// The next reply.
    ///
    /// # Errors
    /// When the connection ended.
    pub fn receive(&mut self) -> io::Result<Reply> {
        let (cookie, reply) = self.0.receive()?;
        assert!(reply.chunks <= 1, "every reply has one chunk");
        let outcome = match reply.error {
            0 if !reply.extents.is_empty() => Outcome::Status(reply.extents),
            0 if !reply.data.is_empty() => Outcome::Data(reply.data),
            0 => Outcome::Done,
            error => Outcome::Error(error),
        };
        Ok(Reply { cookie, outcome })
    }

    /// Sends a request and waits for its outcome, with nothing else in flight.
    pub fn ask(&mut self, kind: u16, flags: CommandFlags, offset: u64, length: u64) -> Outcome {
        let cookie = self.send(kind, flags, offset, length);
        self.outcome_of(cookie)
    }

    /// Writes and waits for the outcome, with nothing else in flight.
    pub fn store(&mut self, offset: u64, data: &[u8]) -> Outcome {
        let cookie = self.write(NONE, offset, data);
        self.outcome_of(cookie)
    }

    fn outcome_of(&mut self, cookie: u64) -> Outcome {
        let reply = self.receive().unwrap();
        assert_eq!(reply.cookie, cookie);
        reply.outcome
    }

    /// Whether the server still answers.
    pub fn is_served(&mut self) -> bool {
        self.ask(kind::READ, NONE, 0, 1) != Outcome::Error(0)
    }

    /// Ends the connection by the protocol, and waits for the server to close it.
    pub fn disconnect(mut self) {
        self.send(kind::DISC, NONE, 0, 0);
        assert!(is_closed(self.stream()));
    }
}

/// Sends an option and reads its replies: the data of the first, or the type of the error.
///
/// # Errors
/// The error reply's type.
pub fn haggle(stream: &mut UnixStream, option: u32, data: &[u8]) -> Result<Vec<u8>, u32> {
    let head = handshake::option_head(option, data.len() as u32);
    stream.write_all(&[&head, data].concat()).unwrap();
    let mut first = None;
    loop {
        let OptionReply { kind, data } = handshake::read_option_reply(stream, option).unwrap();
        match kind {
            reply::ACK => return Ok(first.unwrap_or_default()),
            error if error >> 31 == 1 => return Err(error),
            _ => drop(first.get_or_insert(data)),
        }
    }
}
