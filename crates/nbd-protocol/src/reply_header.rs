//! Replies of the transmission phase as a client reads them.
//!
//! Guarantees: nothing is read past the end of the bytes, and no length from the server is trusted:
//! the caller compares it with its request.

use super::reply::{
    DONE, EXTENDED_LENGTH, EXTENDED_MAGIC, SIMPLE_LENGTH, SIMPLE_MAGIC, STRUCTURED_LENGTH,
    STRUCTURED_MAGIC, chunk, descriptor_length,
};
use super::request::BadMagic;
use super::{Framing, StatusFlags};

/// A reply, or a chunk of one, without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyHeader {
    /// A simple reply. A successful READ's data follows.
    Simple {
        /// Which request it is for.
        cookie: u64,
        /// 0, or an error value.
        error: u32,
    },
    /// A chunk of a structured or extended reply. `length` bytes of payload follow.
    Chunk {
        /// Which request it is for.
        cookie: u64,
        /// Whether no further chunk follows.
        is_last: bool,
        /// The chunk type; see [`chunk`].
        kind: u16,
        /// How many bytes follow.
        length: u64,
    },
}

impl ReplyHeader {
    /// Parses the header at the start of `bytes`. Returns it with its length, or `None` if `bytes`
    /// do not contain all of it.
    ///
    /// # Errors
    /// The bytes do not start with a magic number of this framing.
    pub fn parse(framing: Framing, bytes: &[u8]) -> Result<Option<(Self, usize)>, BadMagic> {
        let Some(magic) = field(bytes, 0) else { return Ok(None) };
        let magic = u32::from_be_bytes(magic);
        Ok(match (framing, magic) {
            (Framing::Simple | Framing::Structured, SIMPLE_MAGIC) => simple(bytes),
            (Framing::Structured, STRUCTURED_MAGIC) => structured(bytes),
            (Framing::Extended, EXTENDED_MAGIC) => extended(bytes),
            _ => return Err(BadMagic(magic)),
        })
    }
}

fn simple(bytes: &[u8]) -> Option<(ReplyHeader, usize)> {
    let error = u32::from_be_bytes(field(bytes, 4)?);
    let cookie = u64::from_be_bytes(field(bytes, 8)?);
    Some((ReplyHeader::Simple { cookie, error }, SIMPLE_LENGTH))
}

fn structured(bytes: &[u8]) -> Option<(ReplyHeader, usize)> {
    let length = u32::from_be_bytes(field(bytes, 16)?);
    Some((chunk_header(bytes, u64::from(length))?, STRUCTURED_LENGTH))
}

fn extended(bytes: &[u8]) -> Option<(ReplyHeader, usize)> {
    let length = u64::from_be_bytes(field(bytes, 24)?);
    Some((chunk_header(bytes, length)?, EXTENDED_LENGTH))
}

fn chunk_header(bytes: &[u8], length: u64) -> Option<ReplyHeader> {
    let flags = u16::from_be_bytes(field(bytes, 4)?);
    let kind = u16::from_be_bytes(field(bytes, 6)?);
    let cookie = u64::from_be_bytes(field(bytes, 8)?);
    Some(ReplyHeader::Chunk { cookie, is_last: flags & DONE != 0, kind, length })
}

/// The range of a chunk of the kind OFFSET_HOLE: these bytes are zero.
pub fn parse_hole(payload: &[u8]) -> Option<(u64, u32)> {
    (payload.len() == 12).then_some(())?;
    Some((u64::from_be_bytes(field(payload, 0)?), u32::from_be_bytes(field(payload, 8)?)))
}

/// The content of a chunk that reports an error: the error value, and a message for people, which
/// may contain anything.
pub fn parse_error(payload: &[u8]) -> Option<(u32, String)> {
    let error = u32::from_be_bytes(field(payload, 0)?);
    let length = usize::from(u16::from_be_bytes(field(payload, 4)?));
    let message = payload.get(6..6 + length)?;
    Some((error, String::from_utf8_lossy(message).into_owned()))
}

/// The first descriptor of a chunk that tells the status of blocks: its context, its length and its
/// flags. A descriptor of length 0 is invalid.
pub fn parse_first_status(kind: u16, payload: &[u8]) -> Option<(u32, u64, StatusFlags)> {
    let context = u32::from_be_bytes(field(payload, 0)?);
    let (framing, start) = match kind {
        chunk::BLOCK_STATUS => (Framing::Structured, 4),
        chunk::BLOCK_STATUS_EXT => (Framing::Extended, 8),
        _ => return None,
    };
    let descriptor = payload.get(start..start + descriptor_length(framing))?;
    let (length, flags) = match framing {
        Framing::Extended => (
            u64::from_be_bytes(field(descriptor, 0)?),
            // All flags of base:allocation are in the lower 32 bits.
            u64::from_be_bytes(field(descriptor, 8)?) as u32,
        ),
        Framing::Simple | Framing::Structured => (
            u64::from(u32::from_be_bytes(field(descriptor, 0)?)),
            u32::from_be_bytes(field(descriptor, 4)?),
        ),
    };
    (length > 0).then(|| (context, length, StatusFlags::from_bits_truncate(flags)))
}

/// The `N` bytes at `at`, if they are there.
fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::reply::{
        MAX_SMALL_REPLY, ReplyTo, StatusChunk, SuccessForm, encode_descriptor, encode_error,
        encode_read_head, encode_status_head, encode_success, read_head_length,
    };
    use crate::{ALLOCATION_CONTEXT, Errno};

    const TO: ReplyTo = ReplyTo { cookie: 77, offset: 0x1_0000 };
    const FRAMINGS: [Framing; 3] = [Framing::Simple, Framing::Structured, Framing::Extended];

    #[test]
    fn what_a_server_encodes_is_read_back() {
        for framing in FRAMINGS {
            let mut out = [0; MAX_SMALL_REPLY];
            let length = encode_success(&mut out, framing, TO, SuccessForm::Shortest);
            let parsed = ReplyHeader::parse(framing, &out[..length]).unwrap().unwrap();
            let expected = match framing {
                Framing::Extended => {
                    ReplyHeader::Chunk { cookie: 77, is_last: true, kind: chunk::NONE, length: 0 }
                }
                _ => ReplyHeader::Simple { cookie: 77, error: 0 },
            };
            assert_eq!(parsed, (expected, length));
            for short in 0..length {
                assert_eq!(ReplyHeader::parse(framing, &out[..short]), Ok(None));
            }
        }
    }

    #[test]
    fn an_error_is_read_back_with_its_message() {
        let mut out = [0; MAX_SMALL_REPLY];
        let length = encode_error(&mut out, Framing::Structured, TO, Errno::NoSpc, "full");
        let (header, head) = ReplyHeader::parse(Framing::Structured, &out).unwrap().unwrap();
        let kind = chunk::ERROR;
        let expected = ReplyHeader::Chunk { cookie: 77, is_last: true, kind, length: 10 };
        assert_eq!(header, expected);
        assert_eq!(parse_error(&out[head..length]), Some((28, "full".into())));
        assert_eq!(parse_error(&out[head..length - 1]), None);
    }

    #[test]
    fn data_and_status_are_announced_with_their_length() {
        let mut out = [0; 64];
        encode_read_head(&mut out, Framing::Extended, TO, 512);
        let (header, head) = ReplyHeader::parse(Framing::Extended, &out).unwrap().unwrap();
        let kind = chunk::OFFSET_DATA;
        assert_eq!(header, ReplyHeader::Chunk { cookie: 77, is_last: true, kind, length: 520 });
        assert_eq!(head + 8, read_head_length(Framing::Extended));
        for (framing, kind) in [
            (Framing::Structured, chunk::BLOCK_STATUS),
            (Framing::Extended, chunk::BLOCK_STATUS_EXT),
        ] {
            let status = StatusChunk { context: ALLOCATION_CONTEXT, count: 1, is_last: true };
            let head = encode_status_head(&mut out, framing, TO, status);
            let flags = StatusFlags::HOLE.bits();
            let end = head + encode_descriptor(&mut out[head..], framing, 4096, flags);
            let start = ReplyHeader::parse(framing, &out).unwrap().unwrap().1;
            let expected = Some((ALLOCATION_CONTEXT, 4096, StatusFlags::HOLE));
            assert_eq!(parse_first_status(kind, &out[start..end]), expected);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_taken_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            for framing in FRAMINGS {
                let _ = ReplyHeader::parse(framing, &bytes);
            }
            let _ = (parse_hole(&bytes), parse_error(&bytes));
            let _ = parse_first_status(chunk::BLOCK_STATUS_EXT, &bytes);
        }
    }
}
