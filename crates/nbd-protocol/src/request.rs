//! Request headers of the transmission phase ("Request message").

use super::{CommandFlags, Framing};

/// The magic of a compact request.
pub const COMPACT_MAGIC: u32 = 0x2560_9513;
/// The magic of an extended request.
pub const EXTENDED_MAGIC: u32 = 0x21e4_1c71;
/// The length of a compact header in bytes.
pub const COMPACT_LENGTH: usize = 28;
/// The length of an extended header in bytes.
pub const EXTENDED_LENGTH: usize = 32;

/// The request types.
pub mod kind {
    /// Read bytes.
    pub const READ: u16 = 0;
    /// Write the payload.
    pub const WRITE: u16 = 1;
    /// Finish and close.
    pub const DISC: u16 = 2;
    /// Make completed writes durable.
    pub const FLUSH: u16 = 3;
    /// The bytes are no longer needed.
    pub const TRIM: u16 = 4;
    /// The bytes will be needed soon.
    pub const CACHE: u16 = 5;
    /// Write zeros without sending them.
    pub const WRITE_ZEROES: u16 = 6;
    /// Report the allocated ranges and the zero ranges.
    pub const BLOCK_STATUS: u16 = 7;
}

/// A request header as received; only its magic number was checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// The command flags, known or not.
    pub flags: CommandFlags,
    /// The request type, known or not; see [`kind`].
    pub kind: u16,
    /// The client's name for the request, repeated in the reply.
    pub cookie: u64,
    /// The first byte of the export.
    pub offset: u64,
    /// Bytes of the export, or of the payload. Below 2^32 in compact headers.
    pub length: u64,
}

/// The header does not start with the negotiated magic number: client and server are out of sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a request starts with 0x{0:08x} instead of its magic number")]
pub struct BadMagic(pub u32);

impl RequestHeader {
    /// Reads the header at the start of `bytes`; `None` if the header is incomplete.
    pub fn parse(framing: Framing, bytes: &[u8]) -> Result<Option<Self>, BadMagic> {
        let Some(bytes) = bytes.get(..framing.request_length()) else { return Ok(None) };
        let expected = match framing {
            Framing::Simple | Framing::Structured => COMPACT_MAGIC,
            Framing::Extended => EXTENDED_MAGIC,
        };
        let magic = u32::from_be_bytes(array(bytes, 0));
        if magic != expected {
            return Err(BadMagic(magic));
        }
        let length = match framing {
            Framing::Simple | Framing::Structured => {
                u64::from(u32::from_be_bytes(array(bytes, 24)))
            }
            Framing::Extended => u64::from_be_bytes(array(bytes, 24)),
        };
        Ok(Some(Self {
            flags: CommandFlags::from_bits_retain(u16::from_be_bytes(array(bytes, 4))),
            kind: u16::from_be_bytes(array(bytes, 6)),
            cookie: u64::from_be_bytes(array(bytes, 8)),
            offset: u64::from_be_bytes(array(bytes, 16)),
            length,
        }))
    }

    /// Appends the header as a client sends it. A compact header keeps the lower 32 bits of the
    /// length.
    pub fn encode(&self, framing: Framing, out: &mut Vec<u8>) {
        let compact = !matches!(framing, Framing::Extended);
        out.extend(if compact { COMPACT_MAGIC } else { EXTENDED_MAGIC }.to_be_bytes());
        out.extend(self.flags.bits().to_be_bytes());
        out.extend(self.kind.to_be_bytes());
        out.extend(self.cookie.to_be_bytes());
        out.extend(self.offset.to_be_bytes());
        if compact {
            out.extend((self.length as u32).to_be_bytes());
        } else {
            out.extend(self.length.to_be_bytes());
        }
    }

    /// How many bytes of payload follow the header.
    ///
    /// The NBD protocol requires the flag `PAYLOAD_LEN` in an extended WRITE. QEMU's client (still
    /// in 10.0) does not set it, but sends the payload. So every WRITE has a payload here.
    pub fn payload_length(&self, framing: Framing) -> u64 {
        let extended = matches!(framing, Framing::Extended);
        let flagged = extended && self.flags.contains(CommandFlags::PAYLOAD_LEN);
        if flagged || self.kind == kind::WRITE { self.length } else { 0 }
    }
}

/// The `N` bytes at `at`. The caller has checked the length.
fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn framings() -> impl Strategy<Value = Framing> {
        prop_oneof![Just(Framing::Simple), Just(Framing::Structured), Just(Framing::Extended)]
    }

    proptest! {
        #[test]
        fn what_a_client_encodes_is_read_back(
            framing in framings(),
            (flags, kind, cookie, offset) in any::<(u16, u16, u64, u64)>(),
            length in any::<u64>(),
        ) {
            let compact = framing.request_length() == COMPACT_LENGTH;
            let header = RequestHeader {
                flags: CommandFlags::from_bits_retain(flags),
                kind,
                cookie,
                offset,
                length: if compact { length & 0xffff_ffff } else { length },
            };
            let mut bytes = Vec::new();
            header.encode(framing, &mut bytes);
            prop_assert_eq!(bytes.len(), framing.request_length());
            for short in 0..bytes.len() {
                prop_assert_eq!(RequestHeader::parse(framing, &bytes[..short]), Ok(None));
            }
            prop_assert_eq!(RequestHeader::parse(framing, &bytes), Ok(Some(header)));
        }

        #[test]
        fn any_other_magic_is_refused(framing in framings(), bytes in any::<[u8; 32]>()) {
            let magic = u32::from_be_bytes(array(&bytes, 0));
            let known = [COMPACT_MAGIC, EXTENDED_MAGIC].contains(&magic);
            prop_assert!(known || RequestHeader::parse(framing, &bytes) == Err(BadMagic(magic)));
        }
    }

    #[test]
    fn a_compact_header_is_not_taken_for_an_extended_one() {
        let mut bytes = vec![0; EXTENDED_LENGTH];
        bytes[..4].copy_from_slice(&COMPACT_MAGIC.to_be_bytes());
        let refused = RequestHeader::parse(Framing::Extended, &bytes);
        assert_eq!(refused, Err(BadMagic(COMPACT_MAGIC)));
    }
}
