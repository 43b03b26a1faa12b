//! Replies of the transmission phase: simple, structured, extended.
//!
//! Each encoder writes at the start of a slice and returns the number of bytes written. A reply
//! with a payload is its head followed directly by the payload, so that both are sent from one
//! buffer.

use super::{Errno, Framing};

/// The magic of a simple reply.
pub const SIMPLE_MAGIC: u32 = 0x6744_6698;
/// The magic of a structured reply chunk.
pub const STRUCTURED_MAGIC: u32 = 0x668e_33ef;
/// The magic of an extended reply chunk.
pub const EXTENDED_MAGIC: u32 = 0x6e8a_278c;

/// The length of a simple reply in bytes.
pub const SIMPLE_LENGTH: usize = 16;
/// The length of a structured chunk's header in bytes.
pub const STRUCTURED_LENGTH: usize = 20;
/// The length of an extended chunk's header in bytes.
pub const EXTENDED_LENGTH: usize = 32;

/// The longest message for people, in bytes. Longer ones are cut.
pub const MAX_MESSAGE: usize = 90;
/// The longest reply without a payload, in bytes.
pub const MAX_SMALL_REPLY: usize = EXTENDED_LENGTH + 6 + MAX_MESSAGE;

/// The flag of the last chunk of a reply.
pub const DONE: u16 = 1;

/// The chunk types.
pub mod chunk {
    /// No payload. As the only chunk of a reply: the request succeeded.
    pub const NONE: u16 = 0;
    /// Bytes of the export.
    pub const OFFSET_DATA: u16 = 1;
    /// A range of zeros.
    pub const OFFSET_HOLE: u16 = 2;
    /// Block status with 32-bit lengths.
    pub const BLOCK_STATUS: u16 = 5;
    /// Block status with 64-bit lengths.
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// The request failed.
    pub const ERROR: u16 = (1 << 15) + 1;
    /// Set in all types of errors.
    pub const ERROR_BIT: u16 = 1 << 15;
}

/// The request that a reply belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyTo {
    /// The client's identifier of the request.
    pub cookie: u64,
    /// The offset in the request's header, which extended replies repeat.
    pub offset: u64,
}

/// Encodes the header of the only chunk of a reply, marked as the last.
fn encode_chunk(out: &mut [u8], framing: Framing, to: ReplyTo, kind: u16, payload: usize) -> usize {
    encode_chunk_of(out, framing, to, (kind, DONE), payload)
}

/// Encodes the head of a chunk of this type with these flags.
fn encode_chunk_of(
    out: &mut [u8],
    framing: Framing,
    to: ReplyTo,
    (kind, flags): (u16, u16),
    payload: usize,
) -> usize {
    let extended = matches!(framing, Framing::Extended);
    let magic = if extended { EXTENDED_MAGIC } else { STRUCTURED_MAGIC };
    out[0..4].copy_from_slice(&magic.to_be_bytes());
    out[4..6].copy_from_slice(&flags.to_be_bytes());
    out[6..8].copy_from_slice(&kind.to_be_bytes());
    out[8..16].copy_from_slice(&to.cookie.to_be_bytes());
    if extended {
        out[16..24].copy_from_slice(&to.offset.to_be_bytes());
        out[24..32].copy_from_slice(&(payload as u64).to_be_bytes());
        EXTENDED_LENGTH
    } else {
        out[16..20].copy_from_slice(&(payload as u32).to_be_bytes());
        STRUCTURED_LENGTH
    }
}

fn encode_simple(out: &mut [u8], cookie: u64, error: u32) -> usize {
    out[0..4].copy_from_slice(&SIMPLE_MAGIC.to_be_bytes());
    out[4..8].copy_from_slice(&error.to_be_bytes());
    out[8..16].copy_from_slice(&cookie.to_be_bytes());
    SIMPLE_LENGTH
}

/// The form of a success without a payload if structured replies were negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SuccessForm {
    /// The reply to a READ: never simple once structured replies were negotiated.
    Chunk,
    /// The reply to anything else: simple if that is allowed, because that is shorter.
    Shortest,
}

/// Encodes the success of a request that has no payload to return; at most [`MAX_SMALL_REPLY`]
/// bytes.
pub fn encode_success(out: &mut [u8], framing: Framing, to: ReplyTo, form: SuccessForm) -> usize {
    match (framing, form) {
        (Framing::Simple, _) | (Framing::Structured, SuccessForm::Shortest) => {
            encode_simple(out, to.cookie, 0)
        }
        (Framing::Structured, SuccessForm::Chunk) | (Framing::Extended, _) => {
            encode_chunk(out, framing, to, chunk::NONE, 0)
        }
    }
}

/// Encodes a failure; at most [`MAX_SMALL_REPLY`] bytes. `message` is for people; simple replies
/// omit it.
pub fn encode_error(
    out: &mut [u8],
    framing: Framing,
    to: ReplyTo,
    errno: Errno,
    message: &str,
) -> usize {
    if !framing.has_chunks() {
        return encode_simple(out, to.cookie, errno as u32);
    }
    let message = &message[..message.floor_char_boundary(MAX_MESSAGE)];
    let length = 6 + message.len();
    let head = encode_chunk(out, framing, to, chunk::ERROR, length);
    let payload = &mut out[head..head + length];
    payload[0..4].copy_from_slice(&(errno as u32).to_be_bytes());
    payload[4..6].copy_from_slice(&(message.len() as u16).to_be_bytes());
    payload[6..].copy_from_slice(message.as_bytes());
    head + length
}

/// The number of bytes before the data of a successful READ.
pub const fn read_head_length(framing: Framing) -> usize {
    match framing {
        Framing::Simple => SIMPLE_LENGTH,
        Framing::Structured => STRUCTURED_LENGTH + 8,
        Framing::Extended => EXTENDED_LENGTH + 8,
    }
}

/// Encodes the head of a successful READ of `length` bytes, at least one. All data is in one chunk,
/// so "don't fragment" always holds.
pub fn encode_read_head(out: &mut [u8], framing: Framing, to: ReplyTo, length: usize) -> usize {
    if !framing.has_chunks() {
        return encode_simple(out, to.cookie, 0);
    }
    let head = encode_chunk(out, framing, to, chunk::OFFSET_DATA, 8 + length);
    out[head..head + 8].copy_from_slice(&to.offset.to_be_bytes());
    head + 8
}

/// The number of bytes before the descriptors of one chunk of a block status reply.
pub const fn status_head_length(framing: Framing) -> usize {
    match framing {
        Framing::Simple | Framing::Structured => STRUCTURED_LENGTH + 4,
        Framing::Extended => EXTENDED_LENGTH + 8,
    }
}

/// How many bytes a block status descriptor has.
pub const fn descriptor_length(framing: Framing) -> usize {
    match framing {
        Framing::Simple | Framing::Structured => 8,
        Framing::Extended => 16,
    }
}

/// The status of one metadata context in a block status reply: a chunk of the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusChunk {
    /// The id of the context.
    pub context: u32,
    /// How many descriptors follow its head, at least one.
    pub count: usize,
    /// Whether no chunk of another context follows.
    pub is_last: bool,
}

/// Encodes the head of a chunk of a block status reply.
pub fn encode_status_head(
    out: &mut [u8],
    framing: Framing,
    to: ReplyTo,
    StatusChunk { context, count, is_last }: StatusChunk,
) -> usize {
    let descriptors = count * descriptor_length(framing);
    let context = context.to_be_bytes();
    let flags = if is_last { DONE } else { 0 };
    if matches!(framing, Framing::Extended) {
        let kind = (chunk::BLOCK_STATUS_EXT, flags);
        let head = encode_chunk_of(out, framing, to, kind, 8 + descriptors);
        out[head..head + 4].copy_from_slice(&context);
        out[head + 4..head + 8].copy_from_slice(&(count as u32).to_be_bytes());
        head + 8
    } else {
        let kind = (chunk::BLOCK_STATUS, flags);
        let head = encode_chunk_of(out, framing, to, kind, 4 + descriptors);
        out[head..head + 4].copy_from_slice(&context);
        head + 4
    }
}

/// Encodes one descriptor with the flags of its context. A compact descriptor cannot hold a length
/// of 2^32 or more. Such a length is cut to the largest multiple of 64 KiB that fits, which the
/// protocol allows for the last descriptor.
pub fn encode_descriptor(out: &mut [u8], framing: Framing, length: u64, flags: u32) -> usize {
    if matches!(framing, Framing::Extended) {
        out[0..8].copy_from_slice(&length.to_be_bytes());
        out[8..16].copy_from_slice(&u64::from(flags).to_be_bytes());
    } else {
        let length = u32::try_from(length).unwrap_or(0xffff_0000);
        out[0..4].copy_from_slice(&length.to_be_bytes());
        out[4..8].copy_from_slice(&flags.to_be_bytes());
    }
    descriptor_length(framing)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StatusFlags;

    const TO: ReplyTo = ReplyTo { cookie: 0x0102_0304_0506_0708, offset: 0x1000 };
    const COOKIE: [u8; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

    fn encoded(encode: impl FnOnce(&mut [u8]) -> usize) -> Vec<u8> {
        let mut out = vec![0xaa; 256];
        let length = encode(&mut out);
        assert!(out[length..].iter().all(|&byte| byte == 0xaa), "bytes after the reply");
        out.truncate(length);
        out
    }

    #[test]
    fn a_simple_reply_is_magic_error_cookie() {
        let bytes = encoded(|out| encode_success(out, Framing::Simple, TO, SuccessForm::Chunk));
        assert_eq!(bytes, [&[0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0][..], &COOKIE].concat());
        let bytes = encoded(|out| encode_error(out, Framing::Simple, TO, Errno::NoSpc, "unseen"));
        assert_eq!(bytes, [&[0x67, 0x44, 0x66, 0x98, 0, 0, 0, 28][..], &COOKIE].concat());
    }

    #[test]
    fn a_read_is_never_answered_simply_once_chunks_were_agreed_on() {
        let bytes = encoded(|out| encode_success(out, Framing::Structured, TO, SuccessForm::Chunk));
        let head = [0x66, 0x8e, 0x33, 0xef, 0, 1, 0, 0];
        assert_eq!(bytes, [&head[..], &COOKIE, &[0; 4]].concat());
        let bytes =
            encoded(|out| encode_success(out, Framing::Structured, TO, SuccessForm::Shortest));
        assert_eq!(bytes.len(), SIMPLE_LENGTH);
    }

    #[test]
    fn an_extended_success_is_a_chunk_of_32_bytes() {
        let bytes =
            encoded(|out| encode_success(out, Framing::Extended, TO, SuccessForm::Shortest));
        let head = [0x6e, 0x8a, 0x27, 0x8c, 0, 1, 0, 0];
        let offset = [0, 0, 0, 0, 0, 0, 0x10, 0];
        assert_eq!(bytes, [&head[..], &COOKIE, &offset, &[0; 8]].concat());
    }

    #[test]
    fn an_error_chunk_carries_its_message() {
        let bytes = encoded(|out| encode_error(out, Framing::Structured, TO, Errno::Inval, "no"));
        let head = [0x66, 0x8e, 0x33, 0xef, 0, 1, 0x80, 1];
        let payload = [0, 0, 0, 8, 0, 0, 0, 22, 0, 2, b'n', b'o'];
        assert_eq!(bytes, [&head[..], &COOKIE, &payload].concat());
    }

    #[test]
    fn a_long_message_is_cut_between_characters() {
        let message = "é".repeat(100);
        for framing in [Framing::Structured, Framing::Extended] {
            let bytes = encoded(|out| encode_error(out, framing, TO, Errno::Io, &message));
            assert!(bytes.len() <= MAX_SMALL_REPLY);
            let at = bytes.len() - MAX_MESSAGE;
            assert!(std::str::from_utf8(&bytes[at..]).is_ok());
        }
    }

    #[test]
    fn a_read_head_announces_its_data() {
        let bytes = encoded(|out| encode_read_head(out, Framing::Structured, TO, 512));
        assert_eq!(bytes.len(), read_head_length(Framing::Structured));
        assert_eq!(bytes[6..8], [0, 1]);
        assert_eq!(bytes[16..], [0, 0, 2, 8, 0, 0, 0, 0, 0, 0, 0x10, 0]);
        let bytes = encoded(|out| encode_read_head(out, Framing::Extended, TO, 512));
        assert_eq!(bytes.len(), read_head_length(Framing::Extended));
        assert_eq!(bytes[24..32], [0, 0, 0, 0, 0, 0, 2, 8]);
        let bytes = encoded(|out| encode_read_head(out, Framing::Simple, TO, 512));
        assert_eq!(bytes.len(), read_head_length(Framing::Simple));
    }

    #[test]
    fn block_status_counts_its_descriptors() {
        let three = StatusChunk { context: 1, count: 3, is_last: true };
        let bytes = encoded(|out| encode_status_head(out, Framing::Structured, TO, three));
        assert_eq!(bytes.len(), status_head_length(Framing::Structured));
        assert_eq!(bytes[16..], [0, 0, 0, 28, 0, 0, 0, 1]);
        let bytes = encoded(|out| encode_status_head(out, Framing::Extended, TO, three));
        assert_eq!(bytes.len(), status_head_length(Framing::Extended));
        assert_eq!(bytes[24..], [0, 0, 0, 0, 0, 0, 0, 56, 0, 0, 0, 1, 0, 0, 0, 3]);
        for framing in [Framing::Structured, Framing::Extended] {
            let more = StatusChunk { context: 7, count: 1, is_last: false };
            let bytes = encoded(|out| encode_status_head(out, framing, TO, more));
            assert_eq!(bytes[4..6], [0, 0], "another chunk follows");
        }
    }

    #[test]
    fn a_compact_descriptor_never_lies_about_its_length() {
        let flags = (StatusFlags::HOLE | StatusFlags::ZERO).bits();
        let bytes = encoded(|out| encode_descriptor(out, Framing::Structured, 5 << 32, flags));
        assert_eq!(bytes, [0xff, 0xff, 0, 0, 0, 0, 0, 3]);
        let bytes = encoded(|out| encode_descriptor(out, Framing::Extended, 5 << 32, flags));
        assert_eq!(bytes, [0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3]);
    }
}
