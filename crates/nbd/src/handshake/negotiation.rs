//! The input of a handshake (the exports) and its result: the negotiated options, or the error.

use std::fmt;

use blockhouse_disk::Access;
use serde::{Deserialize, Serialize};

use crate::proto::{ALLOCATION_CONTEXT, ALLOCATION_DEPTH, BASE_ALLOCATION, DIRTY_BITMAP, Framing};

/// A client that has not chosen an export after this many options is disconnected.
pub const MAX_OPTIONS: u32 = 4096;

/// The properties of an export that are reported to clients, or that the transmission phase depends
/// on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// The canonical name.
    pub name: String,
    /// A description for users, on one line; may be empty.
    pub description: String,
    /// The size in bytes.
    pub size: u64,
    /// The access that clients have.
    pub access: Access,
    /// The smallest block in bytes that clients see: 1, or a sector of the disk.
    pub smallest_block: u32,
    /// The block size in bytes that avoids read-modify-write: a power of two, 512 to 32 MiB.
    pub preferred_block: u32,
    /// Whether a client may have several connections to the export at once.
    pub is_shared: bool,
    /// Whether the export offers [`MetaContext::AllocationDepth`].
    pub has_depth: bool,
    /// The bitmaps that the export offers, 64 at most.
    pub bitmaps: Vec<String>,
}

impl ExportInfo {
    /// The contexts of block status, with the ids that replies have.
    pub fn contexts(&self) -> impl Iterator<Item = (u32, MetaContext)> {
        let bitmaps = self.bitmaps.iter().cloned().map(MetaContext::DirtyBitmap);
        let contexts = std::iter::once(MetaContext::Allocation).chain(bitmaps);
        let depth = self.has_depth.then_some(MetaContext::AllocationDepth);
        (ALLOCATION_CONTEXT..).zip(contexts.chain(depth))
    }
}

/// A metadata context: a property of an export that block status reports.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MetaContext {
    /// `base:allocation`: allocated ranges, and ranges that read as zeros.
    Allocation,
    /// `qemu:dirty-bitmap:` and this name: the dirty ranges of the bitmap.
    DirtyBitmap(String),
    /// `qemu:allocation-depth`: which image of the chain has the data.
    AllocationDepth,
}

impl fmt::Display for MetaContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Allocation => f.write_str(BASE_ALLOCATION),
            Self::DirtyBitmap(name) => write!(f, "{DIRTY_BITMAP}{name}"),
            Self::AllocationDepth => f.write_str(ALLOCATION_DEPTH),
        }
    }
}

/// The exports that a client may request.
pub trait ExportLookup {
    /// The export with this name; the empty name means the default export.
    fn find(&self, name: &str) -> Option<ExportInfo>;
    /// All exports, in the order in which they are listed.
    fn list(&self) -> Vec<ExportInfo>;
    /// Whether there is an export with this name that only clients with TLS may use, while this
    /// client has no TLS.
    fn needs_tls(&self, _name: &str) -> bool {
        false
    }
    /// Called when a client without TLS gets an error because TLS is required.
    fn refuse_plain(&self) {}
}

/// The state of TLS for a client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TlsState {
    /// TLS is not offered.
    #[default]
    Off,
    /// The client may begin TLS.
    Optional,
    /// The client must begin TLS before any other option is answered.
    Required,
    /// TLS has begun.
    Active,
}

/// The options for the transmission phase.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NegotiatedOptions {
    /// The canonical name of the export.
    pub export: String,
    /// The framing of requests and replies.
    pub framing: Framing,
    /// The contexts of replies to BLOCK_STATUS, with their ids. Empty if no context was selected
    /// for the export that was chosen; BLOCK_STATUS is an error then.
    pub contexts: Vec<(u32, MetaContext)>,
}

/// Why a handshake ended without an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// The client sent `NBD_OPT_ABORT`.
    #[error("the client ended the handshake")]
    Aborted,
    /// The client set client flags that were not offered.
    #[error("unknown client flags 0x{0:x}")]
    UnknownFlags(u32),
    /// An option without the magic number: the two ends disagree about where an option starts.
    #[error("an option starts with 0x{0:016x} instead of its magic number")]
    BadMagic(u64),
    /// EXPORT_NAME for an export that does not exist; the option has no error reply.
    #[error("the export asked for does not exist")]
    NoSuchExport,
    /// EXPORT_NAME after extended headers were negotiated, which the protocol forbids.
    #[error("EXPORT_NAME after extended headers")]
    ExportNameForbidden,
    /// An option that is too long even to skip.
    #[error("an option of {0} bytes")]
    OptionTooLong(u32),
    /// EXPORT_NAME without TLS where TLS is required; the option has no error reply.
    #[error("the client chose an export without TLS, which is required")]
    TlsRequired,
    /// Bytes after STARTTLS that were sent before its reply. They were sent in plain text, perhaps
    /// by a man in the middle.
    #[error("the client sent data in plain after STARTTLS")]
    DataBeforeTls,
    /// More options than [`MAX_OPTIONS`].
    #[error("more than {MAX_OPTIONS} options")]
    TooManyOptions,
}
