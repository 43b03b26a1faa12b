//! The vocabulary between the I/O path and an image format: the requests of the path, and its
//! reports about an extent afterwards.
//!
//! This module depends on no format, so that each format can use it.

use blockhouse_core::Unmap;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The caller's intent with the extent of [`Format::map`](crate::Format::map).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// Read it. Nothing is allocated.
    Read,
    /// Overwrite all of it. The answer is always `Mapped`; the space may be `NEW`.
    Write,
    /// Make all of it read as zeros: `Mapped` where zeros have to be written, else a state that
    /// reads as zeros once it is linked. With `Unmap::Forbidden` the space stays allocated.
    Zero(Unmap),
    /// Free its space: `Mapped` where the storage has to be told, else a state that takes effect
    /// when it is linked.
    Discard,
}

/// Why an extent will not be linked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abort {
    /// No operation on its host range is in flight (it failed or never started): new space can be
    /// allocated again at once.
    Ended,
    /// The request's future was dropped while the storage was writing: the host range may still
    /// change, so new space is not allocated again while the image is open. A leak at most.
    InFlight,
}

/// The cheapest way for a durable write whose metadata has to be made durable, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetadataSync {
    /// Each write by FUA, the data first:
    /// [`sync_metadata`](crate::Format::sync_metadata) then needs no flush.
    Fua,
    /// Plain writes and one flush, because one is needed anyway or because many requests share it.
    Flush,
}

/// The outcome of a redo log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Replay {
    /// It was empty.
    Nothing,
    /// Its changes are in the image and durable. This many entries were not.
    Applied {
        /// How many entries of guest clusters differed.
        changes: u64,
    },
    /// It does not fit the image as it is now. Nothing was changed.
    Refused {
        /// Why, in words that follow "the log is refused: ".
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
    /// They are acknowledged and nothing happens, and zero writes keep their space.
    Ignore,
}

/// Look-ups of metadata since the image was opened, by where it was found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounts {
    /// In memory.
    pub hits: u64,
    /// On the host, from where it was read.
    pub misses: u64,
}
