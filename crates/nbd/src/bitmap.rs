//! The bitmaps that an export offers.

use std::sync::Arc;

use blockhouse_core::{ByteRange, Result, Storage};
use blockhouse_disk::{BitmapExtent, DirtyMap, Disk};

/// A bitmap that clients of an export may request (`qemu:dirty-bitmap:NAME`).
#[derive(Clone)]
pub enum ExportBitmap {
    /// A bitmap of the disk. Each request of the client gets the bitmap's state at that moment.
    OfDisk(String),
    /// As [`OfDisk`](Self::OfDisk), but the bitmap of the nearest image in the disk's backing chain
    /// that has one of this name.
    OfChain(String),
    /// A bitmap that never changes.
    Fixed {
        /// The bitmap's name for clients.
        name: String,
        /// The changes that it records.
        dirty: Arc<DirtyMap>,
    },
}

impl ExportBitmap {
    /// The bitmap's name for clients.
    pub fn name(&self) -> &str {
        match self {
            Self::OfDisk(name) | Self::OfChain(name) | Self::Fixed { name, .. } => name,
        }
    }

    /// The bitmap's extents in `range`. The extents are adjacent, and at least `max` are returned
    /// unless there are fewer.
    ///
    /// # Errors
    /// As [`DiskBitmaps::extents`](blockhouse_disk::DiskBitmaps::extents).
    pub(crate) async fn extents<S: Storage>(
        &self,
        disk: &Disk<S>,
        range: ByteRange,
        max: usize,
    ) -> Result<Vec<BitmapExtent>> {
        match self {
            Self::OfDisk(name) => disk.bitmaps().extents(name, range, max).await,
            Self::OfChain(name) => disk.bitmaps().extents_in_chain(name, range, max).await,
            Self::Fixed { dirty, .. } => Ok(dirty.extents(range, max)),
        }
    }
}
