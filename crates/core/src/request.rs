//! The requests of an export to a disk.
//!
//! Every export translates its protocol into these requests, so that one place checks range,
//! alignment, access and limits for all protocols.

use crate::{ByteRange, Durability, IoVector};

/// One request of a guest. Offsets and lengths are in bytes and need no alignment.
///
/// ```
/// use blockhouse_core::{Buffer, ByteRange, Durability, Fallback, Request, Unmap};
///
/// let mut buffer = Buffer::try_new(512)?;
/// // FUA: when it completes, the bytes are on stable storage.
/// let write = Request::Write { offset: 1024, from: buffer.lend(), durability: Durability::Data };
/// // Zeros whose space may be freed; written as data if no quicker way exists.
/// let zeros = Request::WriteZeroes {
///     range: ByteRange::between(4096, 65536),
///     unmap: Unmap::Allowed,
///     fallback: Fallback::Allowed,
///     durability: Durability::None,
/// };
/// # drop((write, zeros));
/// # Ok::<(), blockhouse_core::Error>(())
/// ```
#[derive(Debug)]
pub enum Request {
    /// Fill `into` with the bytes from `offset` on.
    Read {
        /// First byte of the disk.
        offset: u64,
        /// Target of the bytes. The length of `into` is the request's length.
        into: IoVector,
    },
    /// Store the bytes of `from` from `offset` on.
    Write {
        /// First byte of the disk.
        offset: u64,
        /// The bytes. The length of `from` is the request's length.
        from: IoVector,
        /// The data that must be stable on completion.
        durability: Durability,
    },
    /// Make the range read as zeros.
    WriteZeroes {
        /// The bytes of the disk.
        range: ByteRange,
        /// Whether the range's space may be deallocated.
        unmap: Unmap,
        /// Whether the zeros may be written as data, which is slow.
        fallback: Fallback,
        /// The data that must be stable on completion.
        durability: Durability,
    },
    /// The content of the range is no longer needed.
    Discard {
        /// The bytes of the disk.
        range: ByteRange,
        /// The data that must be stable on completion.
        durability: Durability,
    },
    /// All writes completed before this request, on any connection, become durable.
    Flush,
    /// The range will be read soon.
    Prefetch {
        /// The bytes of the disk.
        range: ByteRange,
    },
}

impl Request {
    /// Whether the request changes the disk's content.
    pub fn is_change(&self) -> bool {
        match self {
            Self::Write { .. } | Self::WriteZeroes { .. } | Self::Discard { .. } => true,
            Self::Read { .. } | Self::Flush | Self::Prefetch { .. } => false,
        }
    }
}

/// Whether a zero write may give space back to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmap {
    /// The range may become a hole.
    Allowed,
    /// The space must stay allocated, so that a later write cannot run out of it.
    Forbidden,
}

/// Whether a zero write may fall back to writing zeros as data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallback {
    /// Write zeros as data if there is no quicker way.
    Allowed,
    /// Fail with "not supported" rather than be as slow as a write.
    Forbidden,
}
