//! The labels of a disk's measurements. The metrics use the same names (docs/metrics.md).

use blockhouse_core::{Durability, Request};

/// The kind of export that sent a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportKind {
    /// The program itself: jobs, tools, embedders.
    Local,
    /// An NBD client.
    Nbd,
    /// A guest's virtqueue.
    VhostUser,
    /// The host's kernel, by a block device.
    Ublk,
}

impl ExportKind {
    /// All values, in the order of their discriminants.
    pub const ALL: [Self; 4] = [Self::Local, Self::Nbd, Self::VhostUser, Self::Ublk];

    /// The name of the label in the metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Nbd => "nbd",
            Self::VhostUser => "vhost-user",
            Self::Ublk => "ublk",
        }
    }
}

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A read.
    Read,
    /// A write that a later flush makes durable.
    Write,
    /// A write that is durable when it completes.
    WriteFua,
    /// A zero write: a range becomes zeros, and the request carries no bytes.
    WriteZeroes,
    /// A discard.
    Discard,
    /// A flush.
    Flush,
    /// A query of the allocation, as NBD's block status.
    BlockStatus,
    /// A hint that a range will be read, as NBD's cache command.
    Prefetch,
}

impl Operation {
    /// All values, in the order of their discriminants.
    pub const ALL: [Self; 8] = [
        Self::Read,
        Self::Write,
        Self::WriteFua,
        Self::WriteZeroes,
        Self::Discard,
        Self::Flush,
        Self::BlockStatus,
        Self::Prefetch,
    ];

    /// The operation of a request, and the number of its bytes.
    pub(crate) fn of(request: &Request) -> (Self, u64) {
        match request {
            Request::Read { into, .. } => (Self::Read, into.len() as u64),
            Request::Write { from, durability: Durability::None, .. } => {
                (Self::Write, from.len() as u64)
            }
            Request::Write { from, .. } => (Self::WriteFua, from.len() as u64),
            Request::WriteZeroes { range, .. } => (Self::WriteZeroes, range.length()),
            Request::Discard { range, .. } => (Self::Discard, range.length()),
            Request::Flush => (Self::Flush, 0),
            Request::Prefetch { range } => (Self::Prefetch, range.length()),
        }
    }

    /// The name of the label in the metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::WriteFua => "write_fua",
            Self::WriteZeroes => "write_zeroes",
            Self::Discard => "discard",
            Self::Flush => "flush",
            Self::BlockStatus => "block_status",
            Self::Prefetch => "prefetch",
        }
    }
}

/// An operation at a storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostOperation {
    /// A read.
    Read,
    /// A write without FUA.
    Write,
    /// A write with native FUA.
    WriteFua,
    /// A zero write: the storage zeroes a range, and no zeros are sent to it.
    WriteZeroes,
    /// A range that the storage itself fills with written zeros, ahead of durable writes; no zeros
    /// are sent to it.
    PrepareZeroes,
    /// A discard.
    Discard,
    /// A flush.
    Flush,
}

impl HostOperation {
    /// All values, in the order of their discriminants.
    pub const ALL: [Self; 7] = [
        Self::Read,
        Self::Write,
        Self::WriteFua,
        Self::WriteZeroes,
        Self::PrepareZeroes,
        Self::Discard,
        Self::Flush,
    ];

    /// The name of the label in the metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::WriteFua => "write_fua",
            Self::WriteZeroes => "write_zeroes",
            Self::PrepareZeroes => "prepare_zeroes",
            Self::Discard => "discard",
            Self::Flush => "flush",
        }
    }
}

/// A stage in which requests spend time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// In a queue of this program: the request waits for the disk's rate limits, for the image to
    /// allow changes, or for other changes of the range.
    Queue,
    /// At the host, for an operation on data.
    Host,
    /// At the host, for an operation on the image's metadata.
    Metadata,
    /// At the host, for a flush.
    Flush,
}

impl Stage {
    /// The name of the label in the metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Host => "host",
            Self::Metadata => "metadata",
            Self::Flush => "flush",
        }
    }
}
