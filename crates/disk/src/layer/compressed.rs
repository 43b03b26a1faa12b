//! Reads of compressed clusters, and of host ranges that are less aligned than the storage
//! requires.

use blockhouse_core::{
    Buffer, ByteRange, Error, ErrorKind, Extent, IoVector, Result, Storage, rare,
};
use blockhouse_format::DataPlace;

use super::Layer;
use crate::buffers::{CHUNK_SIZE, CompressedLocation};

impl<S: Storage> Layer<S> {
    /// Reads from the storage, through a buffer if the host range or the memory is not aligned.
    /// Reason: subclusters can be smaller than the storage's blocks, and foreign formats align
    /// their data to sectors only.
    pub(super) async fn read_place(&self, place: DataPlace, into: IoVector) -> Result<()> {
        let host = place.host;
        let is_aligned = self.alignment.admits(host, &into);
        // If the disk is the storage itself, only its end is not aligned, and the storage accepts
        // that.
        if is_aligned || self.format.is_identity() || self.is_encrypted() {
            return self.read_data(place, into).await;
        }
        rare(self.read_misaligned(host, into)).await
    }

    async fn read_misaligned(&self, host: u64, mut into: IoVector) -> Result<()> {
        let mut rest = ByteRange::between(host, host + into.len() as u64);
        while !rest.is_empty() {
            let chunk = rest.truncate(CHUNK_SIZE as u64);
            let outer = chunk.align_outward(self.block_size());
            let mut memory =
                self.cluster_buffers.for_decompression(outer.length() as usize, 0).await?;
            self.data().read_data(outer.offset(), memory.compressed.lend()).await?;
            let start = (chunk.offset() - outer.offset()) as usize;
            let length = chunk.length() as usize;
            into.copy_from(&memory.compressed.bytes()[start..start + length]);
            into.advance(length);
            rest = rest.skip(chunk.length());
        }
        Ok(())
    }

    /// Fills `into` with the extent's bytes of a compressed cluster. The compressed data of the
    /// cluster has at most `length` bytes from `host` on.
    pub(super) async fn read_compressed(
        &self,
        extent: &Extent,
        host: u64,
        length: u64,
        mut into: IoVector,
    ) -> Result<()> {
        let Some(host) = ByteRange::new(host, length) else {
            return Err(self.misplaced(extent));
        };
        let location = CompressedLocation { guest: extent.alloc_range, host };
        let cell = if extent.guest == extent.alloc_range {
            // This read needs the whole cluster, so the cluster is not cached for a next read.
            self.decompressed.get(location).unwrap_or_default()
        } else {
            self.decompressed.get_or_insert(location)
        };
        let cluster = cell.get_or_try_init(|| self.decompress(location)).await?;
        let skipped = (extent.guest.offset() - extent.alloc_range.offset()) as usize;
        into.copy_from(&cluster.bytes()[skipped..skipped + into.len()]);
        Ok(())
    }

    /// The bytes of a compressed cluster.
    async fn decompress(&self, location: CompressedLocation) -> Result<Buffer> {
        let CompressedLocation { guest, host } = location;
        let outer = host.align_outward(self.block_size());
        let whole = guest.length() as usize;
        let mut memory =
            self.cluster_buffers.for_decompression(outer.length() as usize, whole).await?;
        self.data().read_data(outer.offset(), memory.compressed.lend()).await?;
        let start = (host.offset() - outer.offset()) as usize;
        // Bytes past the end of the file are not part of the compressed data, not even as zeros.
        let length = self.data().size().saturating_sub(host.offset()).min(host.length());
        let compressed = &memory.compressed.bytes()[start..start + length as usize];
        self.stats.decompressed();
        self.format.compressed().decompress(compressed, memory.cluster.bytes_mut()).map_err(
            |why| {
                let guest = guest.offset();
                let what =
                    format!("cannot decompress the cluster of the guest's offset {guest} ({why})");
                Error::new(ErrorKind::Corrupt, what)
                    .on(self.name())
                    .at(host.offset())
                    .hint("its compressed data is damaged: restore it from a copy of the image")
            },
        )?;
        Ok(memory.cluster)
    }
}
