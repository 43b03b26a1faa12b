//! The block sizes that a disk reports. Requests that are not aligned to them are served, too.

use blockhouse_core::Storage;

use super::Disk;

/// A smaller granularity is worse for guests: Windows never trims if the unit of discards is one
/// block, and small discards split a file into many extents, and the host's file system keeps a
/// record of each.
const MIN_DISCARD: u64 = 64 << 10;

impl<S: Storage> Disk<S> {
    /// Bytes of a sector of the disk, the unit of its partition table: as the option says, or else
    /// as the images of the chain say (the largest). The size stays the same when a backing file is
    /// detached, or the image is replaced.
    pub fn logical_block_size(&self) -> u64 {
        let first = self.images.first();
        first.options.block_sizes.logical().unwrap_or(first.sector_size)
    }

    /// Bytes of the block that is best written as a whole, at least a sector: as the option says,
    /// or else the unit of the storage's alignment.
    pub fn physical_block_size(&self) -> u64 {
        let of_storage = || u64::from(self.image().alignment().offset);
        let size = self.images.first().options.block_sizes.physical().unwrap_or_else(of_storage);
        size.max(self.logical_block_size())
    }

    /// Bytes of the smallest range that a guest should discard, at least a sector: as the option
    /// says, or else a cluster, but at least a physical block and 64 KiB.
    pub fn discard_granularity(&self) -> u64 {
        let of_image = || {
            let cluster = self.image().cluster_size().unwrap_or(0);
            cluster.max(self.physical_block_size()).max(MIN_DISCARD)
        };
        let size = self.images.first().options.block_sizes.discard().unwrap_or_else(of_image);
        size.max(self.logical_block_size())
    }
}

/// Bytes of the block that is best for requests: a physical block, or the cluster of a disk that
/// compresses.
pub fn preferred_block_size<S: Storage>(disk: &Disk<S>) -> u64 {
    let is_compressed = disk.images.first().options.compress;
    let cluster = disk.image().cluster_size().filter(|_| is_compressed);
    disk.physical_block_size().max(cluster.unwrap_or(0))
}
