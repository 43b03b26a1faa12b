//! The bitmaps that an export offers.

use std::sync::Arc;

use blockhouse_core::{ByteRange, Result, Storage};
use blockhouse_disk::{BitmapExtent, DirtyMap, Disk};

/// A bitmap that clients of an export may request (`qemu:dirty-bitmap:NAME`).
#[derive(Clone)]
pub enum ExportBitmap {
    /// A bitmap of the disk, in its state at the client's request.
    OfDisk(String),
    /// As [`OfDisk`](Self::OfDisk), for the nearest image of the disk's chain that has it.
    OfChain(String),
    /// One that stays as it is.
    Fixed {
        /// Its name for clients.
        name: String,
        /// The changes that it records.
        dirty: Arc<DirtyMap>,
    },
}

impl ExportBitmap {
    /// Its name for clients.
    pub fn name(&self) -> &str {
        match self {
            Self::OfDisk(name) | Self::OfChain(name) | Self::Fixed { name, .. } => name,
        }
    }

    /// Its record of `range`: adjacent extents, at least `max` unless there are fewer.
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
