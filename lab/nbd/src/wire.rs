//! The headers of the NBD transmission phase, and requests that are prepared once and sent again
//! and again.
//!
//! A request frame is built once per slot; only its offset (and, for a write, the stamps of its
//! data) change from one use to the next. Layouts: NBD protocol specification, "Transmission
//! phase".

use anyhow::{Result, bail, ensure};

use crate::pattern;
use crate::protocol::{command, flag};

const REQUEST_MAGIC: u32 = 0x2560_9513;
const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// A simple reply begins with this.
pub const SIMPLE_REPLY: u32 = 0x6744_6698;
/// A chunk of a structured reply begins with this.
pub const STRUCTURED_REPLY: u32 = 0x668e_33ef;
/// A chunk of an extended reply begins with this.
pub const EXTENDED_REPLY: u32 = 0x6e8a_278c;
/// Bytes in the header of a request.
pub const REQUEST: usize = 28;
const OFFSET_FIELD: std::ops::Range<usize> = 16..24;
/// Bytes in the header of a simple reply.
pub const REPLY: usize = 16;

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Read and sometimes check the data.
    Read,
    /// Write with no durability asked for.
    Write,
    /// Write with `NBD_CMD_FLAG_FUA`.
    DurableWrite,
}

/// A request for one slot, which can be sent repeatedly.
pub struct Frame {
    bytes: Vec<u8>,
}

impl Frame {
    /// A request of `length` bytes whose cookie is `slot`; writes carry data of `generation`.
    pub fn new(operation: Operation, slot: u16, length: u32, generation: u64) -> Self {
        let (command, flags) = match operation {
            Operation::Read => (command::READ, 0),
            Operation::Write => (command::WRITE, 0),
            Operation::DurableWrite => (command::WRITE, flag::FUA),
        };
        let mut bytes = header(command, flags, slot.into(), 0, length);
        if operation != Operation::Read {
            bytes.resize(REQUEST + length as usize, 0);
            pattern::fill(&mut bytes[REQUEST..], 0, generation);
        }
        Self { bytes }
    }

    /// Sets the offset of the request, and of the data of a write.
    pub fn set_offset(&mut self, offset: u64) {
        self.bytes[OFFSET_FIELD].copy_from_slice(&offset.to_be_bytes());
        pattern::move_to(&mut self.bytes[REQUEST..], offset);
    }

    /// Sets the generation of the data of a write.
    pub fn set_generation(&mut self, generation: u64) {
        pattern::stamp(&mut self.bytes[REQUEST..], generation);
    }

    /// The offset of the request.
    pub fn offset(&self) -> u64 {
        u64::from_be_bytes(field(&self.bytes, OFFSET_FIELD.start))
    }

    /// The bytes that go to the server.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// The request that ends a connection.
pub fn disconnect() -> Vec<u8> {
    header(command::DISC, 0, 0, 0, 0)
}

/// The header of a request.
pub fn header(command: u16, flags: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    header_with(REQUEST_MAGIC, command, flags, cookie, offset, &length.to_be_bytes())
}

/// The extended header of a request.
pub fn extended_header(command: u16, flags: u16, cookie: u64, offset: u64, length: u64) -> Vec<u8> {
    header_with(EXTENDED_REQUEST_MAGIC, command, flags, cookie, offset, &length.to_be_bytes())
}

/// Both headers: they differ in the magic number and in the size of the length.
fn header_with(
    magic: u32,
    command: u16,
    flags: u16,
    cookie: u64,
    offset: u64,
    length: &[u8],
) -> Vec<u8> {
    let mut bytes = magic.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(length);
    bytes
}

/// The slot that a reply header is for.
///
/// # Errors
/// The bytes are no header, or the header has an error code.
pub fn parse_reply(header: &[u8; REPLY]) -> Result<u64> {
    let magic = u32::from_be_bytes(field(header, 0));
    let error = u32::from_be_bytes(field(header, 4));
    ensure!(magic == SIMPLE_REPLY, "reply magic {magic:#x}: the stream is out of step");
    ensure!(error == 0, "the server answered with error {error}");
    Ok(u64::from_be_bytes(field(header, 8)))
}

/// The header of a successful reply to the request with `cookie`.
pub fn reply(cookie: u64) -> [u8; REPLY] {
    let mut header = [0; REPLY];
    header[..4].copy_from_slice(&SIMPLE_REPLY.to_be_bytes());
    header[8..].copy_from_slice(&cookie.to_be_bytes());
    header
}

/// The operation, cookie and length in bytes of a request header; `None` for `NBD_CMD_DISC`.
pub fn parse_request(header: &[u8; REQUEST]) -> Result<Option<(Operation, u64, u32)>> {
    let magic = u32::from_be_bytes(field(header, 0));
    ensure!(magic == REQUEST_MAGIC, "request magic {magic:#x}: the stream is out of step");
    let operation = match u16::from_be_bytes(field(header, 6)) {
        command::READ => Operation::Read,
        command::WRITE => Operation::Write,
        command::DISC => return Ok(None),
        other => bail!("request of unknown type {other}"),
    };
    let cookie = u64::from_be_bytes(field(header, 8));
    Ok(Some((operation, cookie, u32::from_be_bytes(field(header, 24)))))
}

fn field<const N: usize>(header: &[u8], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&header[at..at + N]);
    bytes
}
