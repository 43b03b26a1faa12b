//! A client that can send what honest clients do not: it sends any request, valid or not, and
//! decodes the replies. It panics if the server breaks the protocol.

use std::collections::HashMap;
use std::io::{self, Read, Write};

use socket2::Socket;

use crate::handshake::Export;
use crate::protocol::{Framing, command, flag};
use crate::socket::is_closed;
use crate::wire;

/// A request as it is sent, valid or not.
#[derive(Clone, Copy, Debug, Default)]
pub struct Request {
    /// One of [`command`].
    pub command: u16,
    /// Bits of [`flag`].
    pub flags: u16,
    /// Where.
    pub offset: u64,
    /// The length that the header claims.
    pub length: u64,
}

/// An extent of a block status: its length, and flags: 1 for a hole, 2 for zeros.
pub type Extent = (u64, u64);

/// A whole reply, with all its chunks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reply {
    /// 0 for success.
    pub error: u32,
    /// The bytes that were read.
    pub data: Vec<u8>,
    /// The extents of a block status.
    pub extents: Vec<Extent>,
    /// The number of its chunks; 0 for a simple reply.
    pub chunks: usize,
}

/// A read in flight.
struct ReadRequest {
    offset: u64,
    length: usize,
    /// Bytes that reply chunks have held so far.
    received: usize,
}

/// A connection to an export.
pub struct Client<S = Socket> {
    /// The connection, for tests that break the rules.
    pub socket: S,
    framing: Framing,
    export: Export,
    cookie: u64,
    /// The reads in flight, by cookie.
    reads: HashMap<u64, ReadRequest>,
    /// Replies of which some chunks have arrived, by cookie.
    partial: HashMap<u64, Reply>,
}

impl<S: Read + Write> Client<S> {
    /// A client after a handshake that negotiated `framing` and opened `export`.
    pub fn new(socket: S, framing: Framing, export: Export) -> Self {
        Self { socket, framing, export, cookie: 0, reads: HashMap::new(), partial: HashMap::new() }
    }

    /// The size of the export in bytes.
    pub fn size(&self) -> u64 {
        self.export.size
    }

    /// The transmission flags of the export.
    pub fn flags(&self) -> u16 {
        self.export.flags
    }

    /// The framing of requests and replies.
    pub fn framing(&self) -> Framing {
        self.framing
    }

    /// Sends a request without payload and returns its cookie.
    pub fn send(&mut self, request: Request) -> io::Result<u64> {
        self.send_with(request, &[])
    }

    /// Sends a request and then `payload`, which may differ from the length in the request. Returns
    /// its cookie.
    pub fn send_with(&mut self, request: Request, payload: &[u8]) -> io::Result<u64> {
        let write = self.framing == Framing::Extended && request.command == command::WRITE;
        let flags = if write { request.flags | flag::PAYLOAD_LEN } else { request.flags };
        let mut bytes = self.encode(Request { flags, ..request });
        bytes.extend_from_slice(payload);
        self.socket.write_all(&bytes)?;
        Ok(self.cookie)
    }

    /// The header of a request with the next cookie and exactly these fields. The reply to it is
    /// expected.
    ///
    /// # Panics
    /// When the length does not fit into a compact header.
    pub fn encode(&mut self, request: Request) -> Vec<u8> {
        self.cookie += 1;
        let Request { command, flags, offset, length } = request;
        if command == command::READ {
            self.reads
                .insert(self.cookie, ReadRequest { offset, length: length as usize, received: 0 });
        }
        if self.framing == Framing::Extended {
            return wire::extended_header(command, flags, self.cookie, offset, length);
        }
        let length = u32::try_from(length).expect("compact lengths");
        wire::header(command, flags, self.cookie, offset, length)
    }

    /// The cookie of the last request.
    pub fn last_cookie(&self) -> u64 {
        self.cookie
    }

    /// Receives until one reply, to any request, is complete. Returns the cookie of that request
    /// and the reply.
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
                let reply = self.partial.remove(&cookie).unwrap_or_default();
                if let Some(read) = self.reads.remove(&cookie)
                    && reply.error == 0
                {
                    assert_eq!(read.received, read.length, "bytes in the reply to a read");
                }
                return Ok((cookie, reply));
            }
        }
    }

    /// Receives a simple reply or a chunk.
    fn receive_part(&mut self) -> io::Result<(u64, bool)> {
        let magic = u32::from_be_bytes(self.take()?);
        match magic {
            wire::SIMPLE_REPLY => {
                assert_ne!(self.framing, Framing::Extended, "a simple reply");
                let error = u32::from_be_bytes(self.take()?);
                let cookie = u64::from_be_bytes(self.take()?);
                let mut reply = Reply { error, ..Reply::default() };
                if let Some(read) = self.reads.get_mut(&cookie) {
                    assert_eq!(self.framing, Framing::Simple, "a simple reply to a read");
                    reply.data = vec![0; if reply.error == 0 { read.length } else { 0 }];
                    self.socket.read_exact(&mut reply.data)?;
                    read.received = reply.data.len();
                }
                self.partial.insert(cookie, reply);
                Ok((cookie, true))
            }
            wire::STRUCTURED_REPLY | wire::EXTENDED_REPLY => {
                let extended = magic == wire::EXTENDED_REPLY;
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
        reply.chunks += 1;
        let word = |at: usize| u32::from_be_bytes(*payload[at..].first_chunk().expect("a word"));
        let long = |at: usize| u64::from_be_bytes(*payload[at..].first_chunk().expect("a long"));
        match kind {
            0 => assert!(payload.is_empty(), "a chunk for nothing with a payload"),
            1 | 2 => {
                let read = self.reads.get_mut(&cookie).expect("a read in flight");
                reply.data.resize(read.length, 0);
                let at = (long(0) - read.offset) as usize;
                let length = if kind == 1 { payload.len() - 8 } else { word(8) as usize };
                read.received += length;
                let part = &mut reply.data[at..at + length];
                if kind == 1 {
                    part.copy_from_slice(&payload[8..]);
                } else {
                    part.fill(0);
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

    /// Reads; returns the bytes or the error.
    #[track_caller]
    pub fn read(&mut self, offset: u64, length: u64) -> Result<Vec<u8>, u32> {
        let request = Request { command: command::READ, flags: 0, offset, length };
        let reply = self.call(request, &[]);
        if reply.error == 0 { Ok(reply.data) } else { Err(reply.error) }
    }

    /// Writes with flags; returns 0 or the error.
    #[track_caller]
    pub fn write(&mut self, offset: u64, bytes: &[u8], flags: u16) -> u32 {
        let length = bytes.len() as u64;
        self.call(Request { command: command::WRITE, flags, offset, length }, bytes).error
    }

    /// Sends a request that has an offset, a length and flags; returns 0 or the error.
    #[track_caller]
    pub fn simple(&mut self, command: u16, offset: u64, length: u64, flags: u16) -> u32 {
        self.call(Request { command, flags, offset, length }, &[]).error
    }

    /// Flushes; returns 0 or the error.
    #[track_caller]
    pub fn flush(&mut self) -> u32 {
        self.simple(command::FLUSH, 0, 0, 0)
    }

    /// Sends `NBD_CMD_DISC` and waits until the server has closed the connection.
    ///
    /// # Panics
    /// When the server sends something instead.
    #[track_caller]
    pub fn disconnect(mut self) {
        let goodbye = Request { command: command::DISC, ..Request::default() };
        self.send(goodbye).expect("the server takes a request");
        assert!(self.is_closed(), "the server says something after the goodbye");
    }

    /// Waits for the end of the connection; returns whether no other byte came before it.
    pub fn is_closed(&mut self) -> bool {
        is_closed(&mut self.socket)
    }
}
