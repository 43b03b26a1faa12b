//! Writing clusters in compressed form.

use blockhouse_core::{ByteRange, Durability, ExtentState, Result, Storage};

use super::Writer;
use super::prepared_extent::PreparedExtent;
use crate::durability::RequestSync;

/// The outcome of a compressed write of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompressResult {
    /// The cluster is stored in compressed form.
    Compressed,
    /// Compression would save no space. Nothing was changed; the caller writes the cluster as
    /// ordinary data.
    Incompressible,
}

impl<S: Storage> Writer<S> {
    /// Stores the one cluster at `range` in compressed form; `bytes` is shorter than a cluster if
    /// the disk ends inside the cluster.
    pub(crate) async fn write_compressed(
        &self,
        range: ByteRange,
        cluster_size: u64,
        bytes: &[u8],
        sync: &RequestSync<'_, S>,
    ) -> Result<CompressResult> {
        let Some(compressed) = self.compress(bytes, cluster_size) else {
            return Ok(CompressResult::Incompressible);
        };
        let _claim = self.claim(range).await;
        let format = self.layer.format();
        let extent = format.compressed().map(range, compressed.len() as u64).await?;
        let mut extent = PreparedExtent::new(format, extent);
        let ExtentState::Compressed { host, length } = extent.state else {
            return Err(self.layer.misplaced(&extent));
        };
        self.layer.invalidate(extent.alloc_range);
        // The memory is taken after the host range, as for copy on write, so a write that waits for
        // this memory holds none of it.
        let mut memory = self.layer.cluster_buffers().for_cow(length as usize).await?;
        let (content, padding) = memory.bytes_mut().split_at_mut(compressed.len());
        content.copy_from_slice(&compressed);
        padding.fill(0);
        extent.begin_io();
        let outcome = self.layer.data().write_data(host, memory.lend(), Durability::None).await;
        extent.complete(outcome, Durability::None).await?;
        sync.note_plain_operation();
        Ok(CompressResult::Compressed)
    }

    /// The compressed form; `None` if it is not shorter than a cluster after padding to whole
    /// blocks.
    fn compress(&self, bytes: &[u8], cluster_size: u64) -> Option<Vec<u8>> {
        let format = self.layer.format();
        let compressed = if bytes.len() as u64 == cluster_size {
            format.compressed().compress(bytes)?
        } else {
            // The part past the disk's end must read as zeros if the disk grows.
            let mut whole = bytes.to_vec();
            whole.resize(cluster_size as usize, 0);
            format.compressed().compress(&whole)?
        };
        let length = (compressed.len() as u64).next_multiple_of(self.layer.block_size());
        (length < cluster_size).then_some(compressed)
    }
}
