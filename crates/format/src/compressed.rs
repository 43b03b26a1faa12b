//! Compressed clusters of an image.

use blockhouse_core::{ByteRange, Extent, Result, Storage};

use crate::{Flat, Format, qcow2};

/// The compressed clusters of an image.
pub struct CompressedClusters<'a, S: Storage> {
    format: &'a Format<S>,
}

impl<S: Storage> Format<S> {
    /// The image's compressed clusters.
    pub fn compressed(&self) -> CompressedClusters<'_, S> {
        CompressedClusters { format: self }
    }
}

impl<S: Storage> CompressedClusters<'_, S> {
    /// Allocates host space for the compressed form of one guest cluster, `length` bytes: an extent
    /// that is `NEW` and `Compressed`. The extent may be longer than `length` (the rest is padding
    /// of any content). Its start and end are multiples of the storage's alignment.
    ///
    /// `guest` is the whole cluster, or ends with the disk; `length`, rounded up to the storage's
    /// alignment, is less than a cluster. The caller passes the extent to exactly one of
    /// [`link`](Format::link) and [`abort`](Format::abort), as it does with those of
    /// [`map`](Format::map).
    ///
    /// # Errors
    /// `Unsupported` if the format has no compressed clusters; or the errors of
    /// [`map`](Format::map) for a write.
    pub async fn map(&self, guest: ByteRange, length: u64) -> Result<Extent> {
        self.format.qcow2_with("compressed clusters")?.map_compressed(guest, length).await
    }

    /// The compressed form of a whole cluster; `None` if it would not be shorter, if the image is
    /// encrypted, or if the format has no compressed clusters.
    pub fn compress(&self, cluster: &[u8]) -> Option<Vec<u8>> {
        // Compressed clusters are never encrypted.
        if self.format.is_encrypted() {
            return None;
        }
        qcow2::compress(self.format.header().compression()?, cluster)
    }

    /// Decompresses a cluster into `into`, which is as long as a cluster.
    ///
    /// # Errors
    /// The reason why the bytes are not a compressed cluster of this image.
    pub fn decompress(&self, compressed: &[u8], into: &mut [u8]) -> Result<(), String> {
        match (self.format, self.format.header().compression()) {
            (Format::Flat(Flat::Foreign(foreign)), _) => foreign.decompress(compressed, into),
            (_, Some(kind)) => qcow2::decompress(kind, compressed, into),
            (_, None) => Err("the format has no compressed clusters".to_owned()),
        }
    }
}
