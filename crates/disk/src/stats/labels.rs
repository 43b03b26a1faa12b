//! The labels of a disk's measurements. The names are those of the metrics' labels
//! (docs/metrics.md).

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
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 4] = [Self::Local, Self::Nbd, Self::VhostUser, Self::Ublk];

    /// As in labels.
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
    /// Zeros, without their bytes.
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
    /// All of them, in the order of their numbers.
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

    /// As in labels.
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

/// The operations at a storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostOperation {
    /// A read.
    Read,
    /// A write without FUA.
    Write,
    /// A write with native FUA.
    WriteFua,
    /// A range that is made zeros without writing them.
    WriteZeroes,
    /// A range that the storage fills with written zeros that are not sent to it, ahead of durable
    /// writes.
    PrepareZeroes,
    /// Space given back.
    Discard,
    /// A flush.
    Flush,
}

impl HostOperation {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 7] = [
        Self::Read,
        Self::Write,
        Self::WriteFua,
        Self::WriteZeroes,
        Self::PrepareZeroes,
        Self::Discard,
        Self::Flush,
    ];

    /// As in labels.
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

/// Where requests spend their time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// In a queue of this program: the request waits for the disk's rate limits, for the image to
    /// allow changes, or for other changes of the range.
    Queue,
    /// At the host, for data.
    Host,
    /// At the host, for the image's metadata.
    Metadata,
    /// At the host, for a flush.
    Flush,
}

impl Stage {
    /// As in labels.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Host => "host",
            Self::Metadata => "metadata",
            Self::Flush => "flush",
        }
    }
}
