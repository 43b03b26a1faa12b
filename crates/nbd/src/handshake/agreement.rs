//! What a handshake is about: the exports there are, what was agreed on, or why nothing was.

use std::fmt;

use blockhouse_disk::Access;

use super::MAX_OPTIONS;
use crate::proto::Framing;

/// What a client can learn about an export, and what the transmission phase depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The canonical name.
    pub name: String,
    /// A line for people; empty for none.
    pub description: String,
    /// The size in bytes.
    pub size: u64,
    /// Whether it can be written.
    pub access: Access,
    /// The block size in bytes that avoids read-modify-write: a power of two, 512 to 32 MiB.
    pub preferred_block: u32,
}

/// The exports that a client may ask for.
pub trait Directory {
    /// The export with this name; the empty name means the default one.
    fn find(&self, name: &str) -> Option<Facts>;
    /// All exports, in the order in which they are listed.
    fn list(&self) -> Vec<Facts>;
}

/// What was agreed on for the transmission phase.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The canonical name of the export.
    pub export: String,
    /// The framing of requests and replies.
    pub framing: Framing,
    /// Whether the client may ask for block status.
    pub block_status: BlockStatusUse,
}

/// Whether `base:allocation` was selected for the export that was then chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockStatusUse {
    /// It was: BLOCK_STATUS is answered.
    Negotiated,
    /// It was not: BLOCK_STATUS is an error.
    NotNegotiated,
}

/// Why a handshake ended without an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Farewell {
    /// The client gave up, as it may.
    Aborted,
    /// It set client flags that nobody offered.
    UnknownFlags(u32),
    /// An option without its magic number: the two ends are out of step.
    BadMagic(u64),
    /// EXPORT_NAME for an export that cannot be had; the option knows no error reply.
    NoSuchExport,
    /// EXPORT_NAME after extended headers were agreed on, which the protocol forbids.
    ExportNameForbidden,
    /// An option longer than anything honest.
    OptionTooLong(u32),
    /// Too many options.
    TooManyOptions,
}

impl fmt::Display for Farewell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Aborted => f.write_str("the client ended the handshake"),
            Self::UnknownFlags(flags) => write!(f, "unknown client flags 0x{flags:x}"),
            Self::BadMagic(magic) => {
                write!(f, "an option starts with 0x{magic:016x} instead of its magic number")
            }
            Self::NoSuchExport => f.write_str("the export asked for does not exist"),
            Self::ExportNameForbidden => f.write_str("EXPORT_NAME after extended headers"),
            Self::OptionTooLong(length) => write!(f, "an option of {length} bytes"),
            Self::TooManyOptions => write!(f, "more than {MAX_OPTIONS} options"),
        }
    }
}
