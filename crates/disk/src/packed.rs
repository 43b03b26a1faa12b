//! Writing clusters in compressed form.

use blockhouse_core::{ByteRange, Durability, Error, ErrorKind, ExtentState, Result, Storage};
use blockhouse_format::Compression;

use crate::Disk;
use crate::prepared::Prepared;

/// What became of a cluster that was to be compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packed {
    /// It is stored in compressed form.
    Stored,
    /// That would save nothing: nothing was changed, and it is to be written like any data.
    NotWorthwhile,
}

impl<S: Storage> Disk<S> {
    /// How clusters are compressed; `None` where the format has no compressed clusters.
    pub fn compression(&self) -> Option<Compression> {
        self.format.compression()
    }

    /// Stores `bytes`, which are those of the one cluster at `offset` (fewer where the disk ends
    /// before the cluster does), in compressed form. Compresses on the thread that polls. Two writes
    /// of the same cluster wait for each other.
    ///
    /// # Errors
    /// As a write; `Unsupported` where the format has no compressed clusters, `InvalidInput` for
    /// anything but one cluster.
    pub async fn write_compressed(&self, offset: u64, bytes: &[u8]) -> Result<Packed> {
        let _counted = self.stats.begin_compressed(bytes.len());
        self.check_access(offset)?;
        let range = self.check_end(offset, bytes.len() as u64, ErrorKind::PastEnd)?;
        let cluster_size = self.check_one_cluster(range)?;
        let Some(packed) = self.pack(bytes, cluster_size) else {
            return Ok(Packed::NotWorthwhile);
        };
        let sync = self.begin_sync(Durability::None);
        self.write_packed(range, &packed).await?;
        sync.note_plain_operation();
        sync.complete().await?;
        Ok(Packed::Stored)
    }

    fn check_one_cluster(&self, range: ByteRange) -> Result<u64> {
        let refuse = |kind, what: &str| {
            let error = Error::new(kind, what.to_owned());
            Err(error.on(self.name()).at(range.offset()))
        };
        let (Some(size), Some(_)) = (self.cluster_size(), self.compression()) else {
            return refuse(ErrorKind::Unsupported, "the format has no compressed clusters");
        };
        let wanted = size.min(self.size().saturating_sub(range.offset()));
        if !range.offset().is_multiple_of(size) || range.length() != wanted || range.is_empty() {
            return refuse(ErrorKind::InvalidInput, "only whole clusters are compressed");
        }
        Ok(size)
    }

    /// The compressed form, if with its padding to whole blocks it is shorter than a cluster.
    fn pack(&self, bytes: &[u8], cluster_size: u64) -> Option<Vec<u8>> {
        let packed = if bytes.len() as u64 == cluster_size {
            self.format.compress(bytes)?
        } else {
            // What lies past the disk's end reads as zeros, should it grow.
            let mut whole = bytes.to_vec();
            whole.resize(cluster_size as usize, 0);
            self.format.compress(&whole)?
        };
        let block = u64::from(self.alignment.offset);
        let length = (packed.len() as u64).next_multiple_of(block);
        (length < cluster_size).then_some(packed)
    }

    async fn write_packed(&self, range: ByteRange, packed: &[u8]) -> Result<()> {
        let claim = self.claim(range).await;
        let extent = self.format.map_compressed(range, packed.len() as u64).await?;
        let mut extent = Prepared::new(&self.format, extent);
        let ExtentState::Compressed { host, length } = extent.state else {
            return Err(self.misplaced(&extent));
        };
        // After the place, as for copies: who waits for this memory holds none of it.
        self.unpacked.forget(extent.alloc_range);
        let mut memory = self.clusters.for_copy(length as usize).await?;
        let (content, padding) = memory.bytes_mut().split_at_mut(packed.len());
        content.copy_from_slice(packed);
        padding.fill(0);
        extent.set_moving();
        let outcome = self.storage().write(host, memory.lend(), Durability::None).await;
        extent.settle(outcome, Durability::None).await?;
        drop(claim);
        Ok(())
    }
}
