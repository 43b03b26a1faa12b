//! The transmission phase: requests as they are told, replies taken apart.

use std::collections::HashMap;
use std::io::{self, Read, Write};

use socket2::Socket;

use super::Address;
use super::handshake::Greeted;

/// Request types.
#[expect(missing_docs, reason = "the names are the protocol\'s own")]
pub mod command {
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISC: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const CACHE: u16 = 5;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of requests.
#[expect(missing_docs, reason = "the names are the protocol\'s own")]
pub mod flag {
    pub const FUA: u16 = 1;
    pub const NO_HOLE: u16 = 2;
    pub const DF: u16 = 4;
    pub const REQ_ONE: u16 = 8;
    pub const FAST_ZERO: u16 = 16;
    pub const PAYLOAD_LEN: u16 = 32;
}

/// The protocol's own numbers for errors.
#[expect(missing_docs, reason = "the names are the protocol\'s own")]
pub mod errno {
    pub const EPERM: u32 = 1;
    pub const EIO: u32 = 5;
    pub const ENOMEM: u32 = 12;
    pub const EINVAL: u32 = 22;
    pub const ENOSPC: u32 = 28;
    pub const EOVERFLOW: u32 = 75;
    pub const ENOTSUP: u32 = 95;
    pub const ESHUTDOWN: u32 = 108;
}

const SIMPLE_REPLY: u32 = 0x6744_6698;
const STRUCTURED_REPLY: u32 = 0x668e_33ef;
const EXTENDED_REPLY: u32 = 0x6e8a_278c;

/// How requests and replies look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// Simple replies.
    Simple,
    /// Structured replies.
    Structured,
    /// Extended headers.
    Extended,
}

impl Framing {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Simple, Self::Structured, Self::Extended];
}

/// A request as it goes out, sensible or not.
#[derive(Clone, Copy, Debug, Default)]
pub struct Request {
    /// One of [`command`].
    pub command: u16,
    /// Bits of [`flag`].
    pub flags: u16,
    /// Where.
    pub offset: u64,
    /// How many bytes it claims to be about.
    pub length: u64,
}

/// A piece of a block status: length, and 1 for a hole + 2 for zeros.
pub type Extent = (u64, u64);

/// A whole reply, all chunks of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    /// 0 for success.
    pub error: u32,
    /// What was read.
    pub data: Vec<u8>,
    /// What was told about blocks.
    pub extents: Vec<Extent>,
}

/// A connection to an export.
pub struct Client {
    /// The connection, for those who want to break the rules.
    pub socket: Socket,
    framing: Framing,
    size: u64,
    cookie: u64,
    /// The first byte and length of each read in flight, by cookie.
    reads: HashMap<u64, (u64, usize)>,
    /// Replies of which chunks have come, by cookie.
    partial: HashMap<u64, Reply>,
}

impl Client {
    /// Opens the default export with simple replies.
    pub fn open(address: &Address) -> Self {
        Self::open_with(address, Framing::Simple)
    }

    /// Opens the default export.
    pub fn open_with(address: &Address, framing: Framing) -> Self {
        Greeted::new(address).go("", framing)
    }

    pub(super) fn new(socket: Socket, framing: Framing, size: u64) -> Self {
        Self { socket, framing, size, cookie: 0, reads: HashMap::new(), partial: HashMap::new() }
    }

    /// The size of the export in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Sends a request without payload and returns its cookie.
    pub fn send(&mut self, request: Request) -> io::Result<u64> {
        self.send_with(request, &[])
    }

    /// Sends a request, whatever it says about its length, and `payload` after it. Returns its
    /// cookie.
    pub fn send_with(&mut self, request: Request, payload: &[u8]) -> io::Result<u64> {
        self.cookie += 1;
        let Request { command, flags, offset, length } = request;
        if command == command::READ {
            self.reads.insert(self.cookie, (offset, length as usize));
        }
        let extended = self.framing == Framing::Extended;
        let magic: u32 = if extended { 0x21e4_1c71 } else { 0x2560_9513 };
        let write = extended && command == command::WRITE;
        let flags = if write { flags | flag::PAYLOAD_LEN } else { flags };
        let mut bytes = Vec::with_capacity(32 + payload.len());
        bytes.extend(magic.to_be_bytes());
        bytes.extend(flags.to_be_bytes());
        bytes.extend(command.to_be_bytes());
        bytes.extend(self.cookie.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        if extended {
            bytes.extend(length.to_be_bytes());
        } else {
            bytes.extend(u32::try_from(length).expect("compact lengths").to_be_bytes());
        }
        bytes.extend_from_slice(payload);
        self.socket.write_all(&bytes)?;
        Ok(self.cookie)
    }

    /// Receives until one reply is whole, to whichever request: the cookie of that request, and the
    /// reply.
    ///
    /// # Errors
    /// When the connection ends.
    ///
    /// # Panics
    /// When the server breaks the protocol.
    pub fn receive(&mut self) -> io::Result<(u64, Reply)> {
        loop {
            let (cookie, last) = self.receive_part()?;
            if last {
                self.reads.remove(&cookie);
                return Ok((cookie, self.partial.remove(&cookie).unwrap_or_default()));
            }
        }
    }

    /// Receives a simple reply or a chunk.
    fn receive_part(&mut self) -> io::Result<(u64, bool)> {
        let magic = u32::from_be_bytes(self.take()?);
        match magic {
            SIMPLE_REPLY => {
                assert_ne!(self.framing, Framing::Extended, "a simple reply");
                let error = u32::from_be_bytes(self.take()?);
                let cookie = u64::from_be_bytes(self.take()?);
                let mut reply = Reply { error, ..Reply::default() };
                if let Some(&(_, length)) = self.reads.get(&cookie) {
                    assert_eq!(self.framing, Framing::Simple, "a simple reply to a read");
                    reply.data = vec![0; if reply.error == 0 { length } else { 0 }];
                    self.socket.read_exact(&mut reply.data)?;
                }
                self.partial.insert(cookie, reply);
                Ok((cookie, true))
            }
            STRUCTURED_REPLY | EXTENDED_REPLY => {
                let extended = magic == EXTENDED_REPLY;
                assert_eq!(extended, self.framing == Framing::Extended, "the reply's framing");
                let flags = u16::from_be_bytes(self.take()?);
                let kind = u16::from_be_bytes(self.take()?);
                let cookie = u64::from_be_bytes(self.take()?);
                let length = if extended {
                    let _offset: [u8; 8] = self.take()?;
                    u64::from_be_bytes(self.take()?)
                } else {
                    u64::from(u32::from_be_bytes(self.take()?))
                };
                assert!(length <= 64 << 20, "a chunk of {length} bytes");
                let mut payload = vec![0; length as usize];
                self.socket.read_exact(&mut payload)?;
                self.take_in(kind, &payload, cookie);
                Ok((cookie, flags & 1 == 1))
            }
            _ => panic!("no reply starts with {magic:#x}"),
        }
    }

    fn take_in(&mut self, kind: u16, payload: &[u8], cookie: u64) {
        let reply = self.partial.entry(cookie).or_default();
        let word = |at: usize| u32::from_be_bytes(*payload[at..].first_chunk().expect("a word"));
        let long = |at: usize| u64::from_be_bytes(*payload[at..].first_chunk().expect("a long"));
        match kind {
            0 => assert!(payload.is_empty(), "a chunk for nothing with a payload"),
            1 | 2 => {
                let &(start, length) = self.reads.get(&cookie).expect("a read in flight");
                reply.data.resize(length, 0);
                let at = (long(0) - start) as usize;
                if kind == 1 {
                    reply.data[at..at + payload.len() - 8].copy_from_slice(&payload[8..]);
                } else {
                    reply.data[at..at + word(8) as usize].fill(0);
                }
            }
            5 => {
                let pieces = (4..payload.len()).step_by(8);
                reply.extents.extend(pieces.map(|at| (word(at).into(), word(at + 4).into())));
            }
            6 => {
                let pieces = (8..payload.len()).step_by(16);
                reply.extents.extend(pieces.map(|at| (long(at), long(at + 8))));
                assert_eq!(word(4) as usize, reply.extents.len(), "the number of extents");
            }
            _ => {
                assert!(kind >= 1 << 15, "an unknown chunk of type {kind}");
                reply.error = word(0);
                assert_ne!(reply.error, 0, "an error that is none");
            }
        }
    }

    fn take<const LENGTH: usize>(&mut self) -> io::Result<[u8; LENGTH]> {
        let mut bytes = [0; LENGTH];
        self.socket.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Sends a request and receives the reply to it.
    ///
    /// # Panics
    /// When the connection ends, or the reply is to another request.
    #[track_caller]
    pub fn call(&mut self, request: Request, payload: &[u8]) -> Reply {
        let sent = self.send_with(request, payload).expect("the server takes a request");
        let (cookie, reply) = self.receive().expect("the server replies");
        assert_eq!(cookie, sent, "the reply is to another request");
        reply
    }

    /// Reads; the bytes or the error.
    #[track_caller]
    pub fn read(&mut self, offset: u64, length: u64) -> Result<Vec<u8>, u32> {
        let request = Request { command: command::READ, flags: 0, offset, length };
        let reply = self.call(request, &[]);
        if reply.error == 0 { Ok(reply.data) } else { Err(reply.error) }
    }

    /// Writes with flags; 0 or the error.
    #[track_caller]
    pub fn write(&mut self, offset: u64, bytes: &[u8], flags: u16) -> u32 {
        let length = bytes.len() as u64;
        self.call(Request { command: command::WRITE, flags, offset, length }, bytes).error
    }

    /// Sends a request that has an offset, a length and flags; 0 or the error.
    #[track_caller]
    pub fn simple(&mut self, command: u16, offset: u64, length: u64, flags: u16) -> u32 {
        self.call(Request { command, flags, offset, length }, &[]).error
    }

    /// Flushes; 0 or the error.
    #[track_caller]
    pub fn flush(&mut self) -> u32 {
        self.simple(command::FLUSH, 0, 0, 0)
    }

    /// Says goodbye and waits until the server has closed the connection.
    ///
    /// # Panics
    /// When the server says something instead.
    #[track_caller]
    pub fn disconnect(mut self) {
        let goodbye = Request { command: command::DISC, ..Request::default() };
        self.send(goodbye).expect("the server takes a request");
        assert!(self.is_closed(), "the server says something after the goodbye");
    }

    /// Waits for the end of the connection; whether it came before anything else.
    pub fn is_closed(&mut self) -> bool {
        is_closed(&mut self.socket)
    }
}

/// Waits for the end of the connection; whether it came before anything else.
///
/// # Panics
/// When nothing at all comes for a long time.
pub(super) fn is_closed(socket: &mut Socket) -> bool {
    match socket.read(&mut [0]) {
        Ok(count) => count == 0,
        Err(error) if error.kind() == io::ErrorKind::ConnectionReset => true,
        Err(error) => panic!("neither a word nor an end: {error}"),
    }
}
