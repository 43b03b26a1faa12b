//! A client that says exactly what it is told to, right or wrong.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use blockhouse_nbd::proto::option::{OPTION_MAGIC, REPLY_MAGIC};
use blockhouse_nbd::proto::reply::{self, chunk};
use blockhouse_nbd::proto::request::{RequestHeader, kind};
use blockhouse_nbd::proto::{CommandFlags, Framing};

/// No flags.
pub const NONE: CommandFlags = CommandFlags::empty();

/// A connection.
pub struct Client {
    pub stream: UnixStream,
    pub framing: Framing,
    /// The size that the server announced.
    pub size: u64,
    /// The transmission flags that it announced.
    pub flags: u16,
    cookie: u64,
    /// What simple replies do not say: how much data follows.
    reads: HashMap<u64, usize>,
}

/// A reply.
#[derive(Debug, PartialEq, Eq)]
pub struct Reply {
    pub cookie: u64,
    pub outcome: Outcome,
}

/// What it says.
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
        let name = [&(export.len() as u32).to_be_bytes()[..], export.as_bytes()].concat();
        match framing {
            Framing::Simple => {}
            Framing::Structured => drop(haggle(&mut stream, 8, &[]).unwrap()),
            Framing::Extended => drop(haggle(&mut stream, 11, &[]).unwrap()),
        }
        if framing.has_chunks() {
            let context = b"base:allocation";
            let length = (context.len() as u32).to_be_bytes();
            let data = [&name[..], &1u32.to_be_bytes(), &length, context].concat();
            haggle(&mut stream, 10, &data).unwrap();
        }
        let info = haggle(&mut stream, 7, &[&name[..], &[0, 0]].concat()).unwrap();
        let size = u64::from_be_bytes(info[2..10].try_into().unwrap());
        let flags = u16::from_be_bytes(info[10..12].try_into().unwrap());
        Self { stream, framing, size, flags, cookie: 0, reads: HashMap::new() }
    }

    /// Sends a request; the answer is its cookie.
    pub fn send(&mut self, kind: u16, flags: CommandFlags, offset: u64, length: u64) -> u64 {
        let bytes = self.encode(kind, flags, offset, length);
        self.stream.write_all(&bytes).unwrap();
        self.cookie
    }

    /// A request as bytes, and a note to expect its reply.
    pub fn encode(&mut self, kind: u16, flags: CommandFlags, offset: u64, length: u64) -> Vec<u8> {
        self.cookie += 1;
        if kind == kind::READ {
            self.reads.insert(self.cookie, length as usize);
        }
        let header = RequestHeader { flags, kind, cookie: self.cookie, offset, length };
        let mut bytes = Vec::new();
        header.encode(self.framing, &mut bytes);
        bytes
    }

    /// Sends a write.
    pub fn write(&mut self, flags: CommandFlags, offset: u64, data: &[u8]) -> u64 {
        let payload = match self.framing {
            Framing::Extended => CommandFlags::PAYLOAD_LEN,
            Framing::Simple | Framing::Structured => NONE,
        };
        let mut bytes = self.encode(kind::WRITE, flags | payload, offset, data.len() as u64);
        bytes.extend_from_slice(data);
        self.stream.write_all(&bytes).unwrap();
        self.cookie
    }

    /// The next reply.
    ///
    /// # Errors
    /// When the connection ended.
    pub fn receive(&mut self) -> io::Result<Reply> {
        let magic = u32::from_be_bytes(self.bytes()?);
        if magic == reply::SIMPLE_MAGIC {
            assert_ne!(self.framing, Framing::Extended, "a simple reply");
            return self.receive_simple();
        }
        let [flags_high, flags_low, kind_high, kind_low] = self.bytes()?;
        let (flags, kind) = ([flags_high, flags_low], [kind_high, kind_low]);
        assert_eq!(u16::from_be_bytes(flags), reply::DONE, "every reply has one chunk");
        let cookie = u64::from_be_bytes(self.bytes()?);
        let length = match self.framing {
            Framing::Simple => panic!("a chunk that was not agreed on"),
            Framing::Structured => {
                assert_eq!(magic, reply::STRUCTURED_MAGIC);
                u64::from(u32::from_be_bytes(self.bytes()?))
            }
            Framing::Extended => {
                assert_eq!(magic, reply::EXTENDED_MAGIC);
                let _offset: [u8; 8] = self.bytes()?;
                u64::from_be_bytes(self.bytes()?)
            }
        };
        let mut payload = vec![0; length as usize];
        self.stream.read_exact(&mut payload)?;
        let outcome = self.outcome(u16::from_be_bytes(kind), payload);
        self.reads.remove(&cookie);
        Ok(Reply { cookie, outcome })
    }

    fn outcome(&self, kind: u16, payload: Vec<u8>) -> Outcome {
        match kind {
            chunk::NONE => Outcome::Done,
            chunk::OFFSET_DATA => Outcome::Data(payload[8..].to_vec()),
            chunk::ERROR => Outcome::Error(u32::from_be_bytes(payload[..4].try_into().unwrap())),
            chunk::BLOCK_STATUS => {
                let number =
                    |bytes: &[u8]| u64::from(u32::from_be_bytes(bytes.try_into().unwrap()));
                let extents = payload[4..].chunks_exact(8);
                Outcome::Status(extents.map(|one| (number(&one[..4]), number(&one[4..]))).collect())
            }
            chunk::BLOCK_STATUS_EXT => {
                let number = |bytes: &[u8]| u64::from_be_bytes(bytes.try_into().unwrap());
                let extents = payload[8..].chunks_exact(16);
                Outcome::Status(extents.map(|one| (number(&one[..8]), number(&one[8..]))).collect())
            }
            other => panic!("a chunk of type {other}"),
        }
    }

    fn receive_simple(&mut self) -> io::Result<Reply> {
        let error = u32::from_be_bytes(self.bytes()?);
        let cookie = u64::from_be_bytes(self.bytes()?);
        let outcome = match (error, self.reads.remove(&cookie)) {
            (0, Some(length)) => {
                assert_eq!(self.framing, Framing::Simple, "a read is answered by a chunk");
                let mut data = vec![0; length];
                self.stream.read_exact(&mut data)?;
                Outcome::Data(data)
            }
            (0, None) => Outcome::Done,
            (error, _) => Outcome::Error(error),
        };
        Ok(Reply { cookie, outcome })
    }

    fn bytes<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Sends a request and waits for its outcome, with nothing else under way.
    pub fn ask(&mut self, kind: u16, flags: CommandFlags, offset: u64, length: u64) -> Outcome {
        let cookie = self.send(kind, flags, offset, length);
        self.outcome_of(cookie)
    }

    /// Writes and waits for the outcome, with nothing else under way.
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

    /// Says goodbye and waits for the server to close.
    pub fn disconnect(mut self) {
        self.send(kind::DISC, NONE, 0, 0);
        assert_eq!(self.stream.read(&mut [0]).unwrap(), 0);
    }
}

/// Sends an option and reads its replies: the data of the first, or the type of the error.
///
/// # Errors
/// The error reply's type.
pub fn haggle(stream: &mut UnixStream, option: u32, data: &[u8]) -> Result<Vec<u8>, u32> {
    let length = (data.len() as u32).to_be_bytes();
    let header = [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &length].concat();
    stream.write_all(&[&header, data].concat()).unwrap();
    let mut first = None;
    loop {
        let mut header = [0; 20];
        stream.read_exact(&mut header).unwrap();
        let word = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
        assert_eq!(header[..8], REPLY_MAGIC.to_be_bytes());
        assert_eq!(word(8), option);
        let mut data = vec![0; word(16) as usize];
        stream.read_exact(&mut data).unwrap();
        match word(12) {
            1 => return Ok(first.unwrap_or_default()),
            error if error >> 31 == 1 => return Err(error),
            _ => drop(first.get_or_insert(data)),
        }
    }
}
