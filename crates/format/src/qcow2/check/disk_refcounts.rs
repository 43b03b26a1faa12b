//! The refcounts on disk of an image that no request changes meanwhile.
//!
//! The refcounts are kept in memory in their on-disk form, without slices that are all zeros, so
//! memory depends on the data in the file. If two entries of the refcount table refer to the same
//! block, the first entry is used, and a check reports the other.

use std::collections::BTreeMap;

use blockhouse_core::{ByteRange, Result, Storage};

use crate::qcow2::layout::geometry::Geometry;
use crate::qcow2::layout::header::Header;
use crate::qcow2::layout::sparse_reader::SparseReader;
use crate::qcow2::layout::{entry, refcount, table_io, words};

use super::counts::Counts;

/// The refcounts on disk of the clusters in the file.
pub(crate) struct DiskRefcounts {
    geometry: Geometry,
    clusters: u64,
    /// The offsets of refcount blocks, by their index in the refcount table.
    blocks: BTreeMap<u64, u64>,
    /// The slices that are not all zeros, by their offset in the file.
    slices: BTreeMap<u64, Vec<u8>>,
}

impl DiskRefcounts {
    /// Reads the refcounts.
    ///
    /// # Errors
    /// Errors of the storage. Invalid entries of the refcount table are read as 0: a check reports
    /// them.
    pub(crate) async fn read<S: Storage>(storage: &S, header: &Header) -> Result<Self> {
        let geometry = header.geometry;
        let bytes = (header.refcount_table_clusters as usize) << geometry.cluster_bits;
        let table = table_io::read(storage, header.refcount_table_offset, bytes).await?;
        // A block that two entries share is read once, and has the index of the first.
        let mut by_offset = BTreeMap::new();
        for (index, word) in (0..).zip(words::words_of(&table)) {
            if let Ok(Some(block)) = entry::refcount_block(word, geometry) {
                by_offset.entry(block).or_insert(index);
            }
        }
        let mut slices = BTreeMap::new();
        let mut reader = SparseReader::new(storage, geometry);
        let step = geometry.slice_size() as usize;
        for &block in by_offset.keys() {
            let mut rest = ByteRange::between(block, block + geometry.cluster_size());
            while let Some((data, bytes)) = reader.read(&mut rest).await? {
                for (offset, slice) in (data.offset()..).step_by(step).zip(bytes.chunks(step)) {
                    if slice.iter().any(|&byte| byte != 0) {
                        slices.insert(offset, slice.to_vec());
                    }
                }
            }
        }
        let blocks = by_offset.into_iter().map(|(block, index)| (index, block)).collect();
        Ok(Self { geometry, clusters: geometry.clusters_for(storage.size()), blocks, slices })
    }

    /// The refcount of a cluster, at most `u32::MAX`. 0 past the end of the file, or without a
    /// refcount block.
    pub(crate) fn get(&self, cluster: u64) -> u32 {
        if cluster >= self.clusters {
            return 0;
        }
        let location = self.geometry.refcount_index(cluster);
        let block = self.blocks.get(&location.table_index);
        let slice = block.and_then(|block| self.slices.get(&(block + location.slice_offset)));
        slice.map_or(0, |slice| self.value(slice, location.index))
    }

    /// Whether a cluster has a refcount block.
    pub(crate) fn has_block(&self, cluster: u64) -> bool {
        self.blocks.contains_key(&self.geometry.refcount_index(cluster).table_index)
    }

    /// The clusters whose refcount is not 0, in order, with their refcounts.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u32)> {
        let geometry = self.geometry;
        let (in_block, in_slice) = (geometry.block_refcounts(), geometry.slice_refcounts());
        let present = self.blocks.iter().flat_map(move |(&index, &block)| {
            let slices = self.slices.range(block..block + geometry.cluster_size());
            slices.map(move |(&offset, slice)| {
                (index * in_block + (offset - block) / geometry.slice_size() * in_slice, slice)
            })
        });
        let all = present.flat_map(move |(first, slice)| {
            refcount::used_from(slice, geometry.refcount_order, 0)
                .map(move |index| (first + index as u64, self.value(slice, index)))
        });
        all.filter(|&(cluster, _)| cluster < self.clusters)
    }

    fn value(&self, slice: &[u8], index: usize) -> u32 {
        let value = refcount::get(slice, self.geometry.refcount_order, index);
        u32::try_from(value).unwrap_or(u32::MAX)
    }
}

/// Merges both: `(cluster, references, refcount on disk)` for each cluster where one is not 0, in
/// the order of the clusters.
pub(crate) fn merge_counts<'a>(
    counts: &'a Counts,
    on_disk: &'a DiskRefcounts,
) -> impl Iterator<Item = (u64, u32, u32)> + use<'a> {
    let (mut counts, mut on_disk) = (counts.iter().peekable(), on_disk.iter().peekable());
    std::iter::from_fn(move || {
        let next = [counts.peek(), on_disk.peek()].into_iter().flatten();
        let cluster = next.map(|&(cluster, _)| cluster).min()?;
        let counted = counts.next_if(|&(next, _)| next == cluster).map_or(0, |(_, count)| count);
        let refcount = on_disk.next_if(|&(next, _)| next == cluster).map_or(0, |(_, count)| count);
        Some((cluster, counted, refcount))
    })
}
