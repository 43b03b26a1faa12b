//! The numbers and layouts of the NBD protocol (`doc/proto.md` of the reference implementation),
//! without any I/O (layer 1), for server and client.
//!
//! `blockhouse-nbd` decides the answers of a server. All fields on the wire are big-endian; strings
//! are UTF-8 without NUL. [`uri`] names an export and its server.
#![forbid(unsafe_code)]

pub mod option;
pub mod reply;
pub mod reply_header;
pub mod request;
pub mod tls_parameters;
pub mod uri;

use bitflags::bitflags;
use blockhouse_core::InFlightLimits;
use serde::{Deserialize, Serialize};

/// The port that IANA gave to NBD.
pub const DEFAULT_PORT: u16 = 10809;

/// The longest string the protocol allows, in bytes ("Conventions").
pub const MAX_STRING: usize = 4096;

/// The longest payload of one request or reply, in bytes: the limit that a client may assume if the
/// server announces none ("Size constraints"), and that this server announces.
pub const MAX_PAYLOAD: u32 = InFlightLimits::DEFAULT.request_bytes as u32;

/// The id that stands for `base:allocation` in block status replies. The next ids are those of
/// bitmaps, then that of the allocation depth.
pub const ALLOCATION_CONTEXT: u32 = 1;

/// The metadata context that tells what is allocated ("Metadata querying").
pub const BASE_ALLOCATION: &str = "base:allocation";

/// The prefix of the name of a metadata context that reports the changes since a bitmap was made;
/// the bitmap's name follows (`docs/interop/nbd.txt` of QEMU).
pub const DIRTY_BITMAP: &str = "qemu:dirty-bitmap:";

/// The metadata context that tells which image of a chain has the data: 1 for the export's own, 2
/// for its backing file, and so on; 0 if no image has the data (`docs/interop/nbd.txt` of QEMU).
pub const ALLOCATION_DEPTH: &str = "qemu:allocation-depth";

/// The flag of a block status descriptor in the context of a bitmap: the range has changed
/// (`NBD_STATE_DIRTY`).
pub const DIRTY: u32 = 1 << 0;

bitflags! {
    /// The abilities of an export ("Transmission flags").
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct TransmissionFlags: u16 {
        /// Always set.
        const HAS_FLAGS = 1 << 0;
        /// Writes are refused.
        const READ_ONLY = 1 << 1;
        /// FLUSH is understood.
        const SEND_FLUSH = 1 << 2;
        /// The FUA flag is understood.
        const SEND_FUA = 1 << 3;
        /// TRIM is understood.
        const SEND_TRIM = 1 << 5;
        /// WRITE_ZEROES and its NO_HOLE flag are understood.
        const SEND_WRITE_ZEROES = 1 << 6;
        /// The DF flag of READ is understood.
        const SEND_DF = 1 << 7;
        /// A flush on one connection covers the writes of all connections.
        const CAN_MULTI_CONN = 1 << 8;
        /// CACHE is understood.
        const SEND_CACHE = 1 << 10;
        /// The FAST_ZERO flag of WRITE_ZEROES is understood.
        const SEND_FAST_ZERO = 1 << 11;
        /// The PAYLOAD_LEN flag of BLOCK_STATUS is understood.
        const BLOCK_STATUS_PAYLOAD = 1 << 12;
    }

    /// A client's demands for one request ("Command flags").
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct CommandFlags: u16 {
        /// The request's bytes must be durable before the reply.
        const FUA = 1 << 0;
        /// WRITE_ZEROES must not leave a hole.
        const NO_HOLE = 1 << 1;
        /// READ must be answered in one piece.
        const DF = 1 << 2;
        /// BLOCK_STATUS must be answered with one extent.
        const REQ_ONE = 1 << 3;
        /// WRITE_ZEROES must fail rather than be as slow as a write.
        const FAST_ZERO = 1 << 4;
        /// The length is that of a payload after the (extended) header: the data of WRITE, or the
        /// contexts that BLOCK_STATUS asks for.
        const PAYLOAD_LEN = 1 << 5;
        // A client may send any bit; a request with an unnamed bit is refused.
        const _ = !0;
    }

    /// The flags of a block status descriptor in the context `base:allocation`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct StatusFlags: u32 {
        /// No space is allocated.
        const HOLE = 1 << 0;
        /// Reads as zeros.
        const ZERO = 1 << 1;
    }
}

/// The errors that a reply can carry ("Error values").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Errno {
    /// Operation not permitted: writing to a read-only export.
    Perm = 1,
    /// Input/output error.
    Io = 5,
    /// Cannot allocate memory.
    NoMem = 12,
    /// Invalid argument.
    Inval = 22,
    /// No space left on device, or a write past the end.
    NoSpc = 28,
    /// Value too large: a request beyond the announced limits.
    Overflow = 75,
    /// Operation not supported: only for fast zeroing.
    NotSup = 95,
    /// The server is shutting down.
    Shutdown = 108,
}

impl Errno {
    /// The protocol's value for an errno of Linux. An errno that the protocol does not have becomes
    /// EIO, so that no client takes a failure of the host for a mistake of its own.
    pub fn from_linux(code: i32) -> Self {
        match code {
            1 | 13 /* EACCES */ | 30 /* EROFS */ => Self::Perm,
            12 => Self::NoMem,
            22 => Self::Inval,
            28 | 27 /* EFBIG */ | 122 /* EDQUOT */ => Self::NoSpc,
            75 => Self::Overflow,
            95 | 38 /* ENOSYS */ | 25 /* ENOTTY */ => Self::NotSup,
            108 => Self::Shutdown,
            _ => Self::Io,
        }
    }
}

/// How requests and replies are framed in the transmission phase, as agreed in the handshake.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Framing {
    /// Compact requests, simple replies only.
    #[default]
    Simple,
    /// Compact requests; replies with a payload, and errors, as structured chunks.
    Structured,
    /// Extended requests and extended replies only.
    Extended,
}

impl Framing {
    /// How many bytes a request header has.
    pub const fn request_length(self) -> usize {
        match self {
            Self::Simple | Self::Structured => request::COMPACT_LENGTH,
            Self::Extended => request::EXTENDED_LENGTH,
        }
    }

    /// Whether replies are sent in chunks, which block status and DF need.
    pub const fn has_chunks(self) -> bool {
        !matches!(self, Self::Simple)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_errors_keep_their_meaning() {
        assert_eq!(Errno::from_linux(28), Errno::NoSpc);
        assert_eq!(Errno::from_linux(122), Errno::NoSpc);
        assert_eq!(Errno::from_linux(5), Errno::Io);
        assert_eq!(Errno::from_linux(110), Errno::Io, "a timeout is no mistake of the client");
        assert_eq!(Errno::from_linux(30), Errno::Perm);
    }
}
