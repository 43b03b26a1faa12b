//! The meaning of an input of `vhost_messages`: the messages of a front-end, with file descriptors.
//!
//! Every string of bytes means something, and small changes of it mean small changes. Each message
//! has four bytes and its payload:
//!
//! | byte | meaning |
//! | --- | --- |
//! | 0 | the request |
//! | 1 | bit 0: a reply is needed; bit 1: the header's flags are this byte; bits 2 to 7: bytes by which the announced length is too long, if bit 1 is set |
//! | 2 | how many descriptors come with it (bits 0 to 5), of which kind (bits 6 and 7) |
//! | 3 | bytes of the payload |

/// Bytes before a payload.
const HEAD: usize = 4;
/// How many messages an input has at most: less than a socket holds.
const MAX_MESSAGES: usize = 64;

/// The version of the protocol, and the flag that asks for a reply (vhost-user specification,
/// "Header").
const VERSION: u32 = 1;
const NEED_REPLY: u32 = 1 << 3;

/// One message.
#[derive(Clone, Debug)]
pub struct Message {
    /// The request.
    pub request: u8,
    /// See the table above.
    pub flags: u8,
    /// See the table above.
    pub descriptors: u8,
    /// At most 255 bytes.
    pub payload: Vec<u8>,
}

/// The kind of a descriptor's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A file in memory.
    Memory,
    /// An eventfd.
    Event,
    /// A Unix socket.
    Socket,
    /// One of each, in turn.
    Mixed,
}

impl Message {
    /// The messages of an input.
    pub fn all_of(mut data: &[u8]) -> Vec<Self> {
        let mut messages = Vec::new();
        while let Some((&[request, flags, descriptors, length], rest)) = data.split_first_chunk()
            && messages.len() < MAX_MESSAGES
        {
            let (payload, rest) = rest.split_at(rest.len().min(length.into()));
            messages.push(Self { request, flags, descriptors, payload: payload.to_vec() });
            data = rest;
        }
        messages
    }

    /// The bytes of an input that mean this.
    pub fn to_input(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD + self.payload.len());
        bytes.extend([self.request, self.flags, self.descriptors, self.payload.len() as u8]);
        bytes.extend_from_slice(&self.payload);
        bytes
    }

    /// The bytes on the socket.
    pub fn to_bytes(&self) -> Vec<u8> {
        let is_raw = self.flags & 2 != 0;
        let flags = if is_raw {
            self.flags.into()
        } else {
            VERSION | if self.flags & 1 != 0 { NEED_REPLY } else { 0 }
        };
        let too_long = if is_raw { u32::from(self.flags >> 2) } else { 0 };
        let length = self.payload.len() as u32 + too_long;
        let header = [self.request.into(), flags, length];
        let mut bytes: Vec<u8> = header.into_iter().flat_map(u32::to_ne_bytes).collect();
        bytes.extend_from_slice(&self.payload);
        bytes
    }

    /// The files whose descriptors come with the message.
    pub fn files(&self) -> impl Iterator<Item = FileKind> {
        let kind = match self.descriptors >> 6 {
            0 => FileKind::Memory,
            1 => FileKind::Event,
            2 => FileKind::Socket,
            _ => FileKind::Mixed,
        };
        const EACH: [FileKind; 3] = [FileKind::Memory, FileKind::Event, FileKind::Socket];
        (0..self.descriptors & 0x3f).map(move |index| match kind {
            FileKind::Mixed => EACH[usize::from(index) % EACH.len()],
            kind => kind,
        })
    }
}
