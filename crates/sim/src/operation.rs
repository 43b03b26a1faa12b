//! The operations of a simulated disk, for tests that count system calls.

use blockhouse_core::{ByteRange, Durability, SyncMode, Unmap};

/// One operation, as it was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A read.
    Read(ByteRange),
    /// A write and its durability.
    Write(ByteRange, Durability),
    /// A zero write without data.
    WriteZeroes(ByteRange, Unmap),
    /// Zeros that the disk writes without being sent them.
    PrepareZeroes(ByteRange),
    /// A discard.
    Discard(ByteRange),
    /// A flush.
    Flush(SyncMode),
    /// A change of size.
    Resize(u64),
    /// An increase to this size; no change if the disk is that large already.
    Lengthen(u64),
    /// A query for holes.
    Status(ByteRange),
    /// A hint to read ahead.
    Prefetch(ByteRange),
    /// The close of a handle, if it [releases a resource](crate::Config::needs_close).
    Close,
}

/// The kinds of operations, for faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperationKind {
    /// [`Operation::Read`]
    Read,
    /// [`Operation::Write`] without durability
    Write,
    /// [`Operation::Write`] with durability
    DurableWrite,
    /// [`Operation::WriteZeroes`]
    WriteZeroes,
    /// [`Operation::PrepareZeroes`]
    PrepareZeroes,
    /// [`Operation::Discard`]
    Discard,
    /// [`Operation::Flush`]
    Flush,
    /// [`Operation::Resize`]
    Resize,
    /// [`Operation::Lengthen`]
    Lengthen,
    /// [`Operation::Status`]
    Status,
    /// [`Operation::Prefetch`]
    Prefetch,
    /// [`Operation::Close`]
    Close,
}

impl Operation {
    /// The kind.
    pub fn kind(&self) -> OperationKind {
        match self {
            Self::Read(_) => OperationKind::Read,
            Self::Write(_, Durability::None) => OperationKind::Write,
            Self::Write(..) => OperationKind::DurableWrite,
            Self::WriteZeroes(..) => OperationKind::WriteZeroes,
            Self::PrepareZeroes(_) => OperationKind::PrepareZeroes,
            Self::Discard(_) => OperationKind::Discard,
            Self::Flush(_) => OperationKind::Flush,
            Self::Resize(_) => OperationKind::Resize,
            Self::Lengthen(_) => OperationKind::Lengthen,
            Self::Status(_) => OperationKind::Status,
            Self::Prefetch(_) => OperationKind::Prefetch,
            Self::Close => OperationKind::Close,
        }
    }

    /// The range of the operation, if it has one.
    pub fn range(&self) -> Option<ByteRange> {
        match *self {
            Self::Read(range)
            | Self::Write(range, _)
            | Self::WriteZeroes(range, _)
            | Self::PrepareZeroes(range)
            | Self::Discard(range)
            | Self::Status(range)
            | Self::Prefetch(range) => Some(range),
            Self::Flush(_) | Self::Resize(_) | Self::Lengthen(_) | Self::Close => None,
        }
    }

    /// Whether the operation changes the disk's content or size.
    pub(crate) fn is_change(&self) -> bool {
        match self {
            Self::Read(_) | Self::Status(_) | Self::Prefetch(_) | Self::Flush(_) | Self::Close => {
                false
            }
            Self::Write(..)
            | Self::WriteZeroes(..)
            | Self::PrepareZeroes(_)
            | Self::Discard(_)
            | Self::Resize(_)
            | Self::Lengthen(_) => true,
        }
    }

    /// Whether its outcome concerns the stability of bytes. If the future of such an operation is
    /// dropped, its outcome is stored for the next flush.
    pub(crate) fn is_durable(&self) -> bool {
        matches!(self.kind(), OperationKind::DurableWrite | OperationKind::Flush)
    }
}
