//! Types shared by the I/O path and the image formats: the requests of the I/O path, and the
//! outcome of an extent that it reports later.
//!
//! This module depends on no format, so that each format can use it.

use blockhouse_core::Unmap;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The operation that a caller of [`Format::map`](crate::Format::map) plans on the extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// Read it. Nothing is allocated.
    Read,
    /// Overwrite all of it. The result is always `Mapped`; the space may be `NEW`.
    Write,
    /// Make all of it read as zeros. `Mapped` if zeros must be written, else a state that reads as
    /// zeros once it is linked. With `Unmap::Forbidden` the space stays allocated.
    Zero(Unmap),
    /// Free its space. `Mapped` if the storage must discard the range, else a state that takes
    /// effect when it is linked.
    Discard,
}

/// The reason why an extent will not be linked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abort {
    /// The operation on its host range failed or never started: new space can be allocated again
    /// at once.
    Ended,
    /// The request's future was dropped while the storage was writing. The host range may still
    /// change, so new space is not allocated again while the image is open; at most, the space
    /// leaks.
    InFlight,
}

/// The cheapest way to make a write and its metadata durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetadataSync {
    /// The data is written with FUA first, so that [`sync_metadata`](crate::Format::sync_metadata)
    /// needs no flush.
    Fua,
    /// Plain writes and one flush, which is needed anyway or shared by many requests.
    Flush,
}

/// The outcome of the replay of a redo log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Replay {
    /// The log was empty.
    Nothing,
    /// All changes of the log are in the image and durable.
    Applied {
        /// The number of guest clusters whose entries were changed for that.
        changes: u64,
    },
    /// The log does not match the image. Nothing was changed.
    Refused {
        /// The reason, as text that follows "the log is refused: ".
        why: String,
    },
}

/// The access that an image is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads only: nothing is written to the image, and every change is refused with EPERM.
    ReadOnly,
    /// Reads and writes.
    ReadWrite,
}

/// The effect of a guest's discards.
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Discard {
    /// The host gets the space back.
    #[default]
    Unmap,
    /// Discards are completed without any effect, and zero writes do not free space.
    Ignore,
}

/// Metadata look-ups since the image was opened, by the place of the metadata.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounts {
    /// Metadata in memory.
    pub hits: u64,
    /// Metadata that was read from the host.
    pub misses: u64,
}
