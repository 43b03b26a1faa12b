//! Sets refcounts on disk to given values while the image is not open, either in place, or in a new
//! refcount table with new blocks if the old ones are invalid.
//!
//! The new structures are written at offsets past all clusters in use, and are durable before one
//! write of the header switches to them. So after a crash the image has either the old refcounts or
//! the new ones.

use std::collections::BTreeSet;

use blockhouse_core::{ByteRange, Durability, Error, ErrorKind, Result, Storage, SyncMode};

use crate::qcow2::layout::geometry::Geometry;
use crate::qcow2::layout::header::{Header, SECTOR};
use crate::qcow2::layout::limits::{MAX_OFFSET, MAX_REFCOUNT_TABLE};
use crate::qcow2::layout::sparse_reader::SparseReader;
use crate::qcow2::layout::{entry, refcount, table_io, words};

use super::counts::Counts;
use super::disk_refcounts::DiskRefcounts;

/// Whether every cluster whose count is not 0 has a refcount block.
pub(crate) fn has_blocks(recorded: &DiskRefcounts, counts: &Counts) -> bool {
    counts.iter().all(|(cluster, _)| recorded.has_block(cluster))
}

/// Sets the refcounts in all refcount blocks, to 0 for clusters past the end of `counts`. Durable
/// with the next flush.
pub(crate) async fn store_in_place<S: Storage>(
    storage: &S,
    header: &Header,
    counts: &Counts,
) -> Result<()> {
    let geometry = header.geometry;
    let (step, in_block) = (geometry.slice_size() as usize, geometry.block_refcounts());
    let mut reader = SparseReader::new(storage, geometry);
    for (index, word) in (0..).zip(read_table(storage, header).await?) {
        let Ok(Some(block)) = entry::refcount_block(word, geometry) else { continue };
        let mut range = ByteRange::between(block, block + geometry.cluster_size());
        // The block on disk and the new counts are both all zeros, so no write is needed.
        if !counts.has_any(index * in_block..(index + 1) * in_block)
            && reader.next_data(&mut range).await.is_none()
        {
            continue;
        }
        let old = table_io::read(storage, block, geometry.cluster_size() as usize).await?;
        let new = block_bytes(geometry, counts, index);
        for (start, (old, new)) in
            (block..).step_by(step).zip(old.chunks(step).zip(new.chunks(step)))
        {
            if old != new {
                table_io::write(storage, start, new, Durability::None).await?;
            }
        }
    }
    Ok(())
}

/// Makes a new refcount table, and durably points the header to it. The table has these refcounts
/// and the refcounts of its own clusters, which are added to `counts`. Its blocks and the table
/// begin at cluster `start`; no cluster from there on is in use.
///
/// # Errors
/// `NoSpace` if the table would be larger than the format allows; or errors of the storage. The old
/// table is unchanged then.
pub(crate) async fn rebuild_refcount_table<S: Storage>(
    storage: &S,
    header: &mut Header,
    counts: &mut Counts,
    start: u64,
) -> Result<()> {
    let geometry = header.geometry;
    let (blocks, table_clusters) = plan(geometry, counts, start);
    let end = start + blocks.len() as u64 + table_clusters;
    if table_clusters << geometry.cluster_bits > MAX_REFCOUNT_TABLE
        || end > MAX_OFFSET >> geometry.cluster_bits
    {
        let what = "the refcount table would be larger than its format allows";
        return Err(Error::new(ErrorKind::NoSpace, what).on(storage.name()));
    }
    counts.extend_to(end);
    for cluster in start..end {
        counts.set(cluster, 1)?;
    }
    let table_offset = geometry.offset_of(start + blocks.len() as u64);
    let mut table = vec![0; (table_clusters << geometry.cluster_bits) as usize / 8];
    for (&index, cluster) in blocks.iter().zip(start..) {
        let offset = geometry.offset_of(cluster);
        table[index as usize] = offset;
        let bytes = block_bytes(geometry, counts, index);
        table_io::write(storage, offset, &bytes, Durability::None).await?;
    }
    let bytes = words::bytes_of(&table);
    table_io::write(storage, table_offset, &bytes, Durability::None).await?;
    storage.flush(SyncMode::Data).await?;
    header.refcount_table_offset = table_offset;
    header.refcount_table_clusters = table_clusters as u32;
    store_header(storage, header).await
}

/// The indexes of the necessary refcount blocks, and the number of clusters of their table.
fn plan(geometry: Geometry, counts: &Counts, start: u64) -> (Vec<u64>, u64) {
    let per_block = geometry.block_refcounts();
    let used: BTreeSet<u64> = counts.iter().map(|(cluster, _)| cluster / per_block).collect();
    let mut total = 1;
    loop {
        let mut blocks = used.clone();
        blocks.extend(start / per_block..=(start + total - 1) / per_block);
        let last = blocks.last().copied().unwrap_or(0);
        let table = geometry.clusters_for((last + 1) * 8);
        if blocks.len() as u64 + table <= total {
            return (blocks.into_iter().collect(), table);
        }
        total = blocks.len() as u64 + table;
    }
}

fn block_bytes(geometry: Geometry, counts: &Counts, index: u64) -> Vec<u8> {
    let mut bytes = vec![0; geometry.cluster_size() as usize];
    let first = index * geometry.block_refcounts();
    for (cluster, count) in counts.range(first..first + geometry.block_refcounts()) {
        // A count that is too large to be stored becomes the maximum.
        let count = u64::from(count).min(geometry.max_refcount());
        refcount::set(&mut bytes, geometry.refcount_order, (cluster - first) as usize, count);
    }
    bytes
}

async fn read_table<S: Storage>(storage: &S, header: &Header) -> Result<Vec<u64>> {
    let bytes = (header.refcount_table_clusters as usize) << header.geometry.cluster_bits;
    let table = table_io::read(storage, header.refcount_table_offset, bytes).await?;
    Ok(words::words_of(&table))
}

/// Writes the fields of the header that can change, durably.
pub(crate) async fn store_header<S: Storage>(storage: &S, header: &Header) -> Result<()> {
    let block = storage.capabilities().alignment.offset as usize;
    let mut bytes = table_io::read(storage, 0, SECTOR.max(block)).await?;
    header.patch(&mut bytes);
    table_io::write(storage, 0, &bytes, Durability::None).await?;
    storage.flush(SyncMode::Data).await
}
