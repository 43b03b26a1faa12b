//! Refcounts on disk set to given values, outside of any opened image: at their places, or in a new
//! refcount table with new blocks where the old ones cannot be relied on.
//!
//! The new structures go to the end of the file, where nothing is; they are durable before the header
//! points to them, which is one write. So a crash leaves the old refcounts or the new ones.

use std::collections::BTreeSet;

use blockhouse_core::{Durability, Error, ErrorKind, Result, Storage, Sync};

use super::geometry::Geometry;
use super::header::{Header, SECTOR};
use super::{entry, refcount, table_io};

/// The largest refcount table, in bytes.
const MOST_TABLE: u64 = 8 << 20;

/// Whether every cluster that counts has a refcount block.
pub(crate) async fn has_blocks<S: Storage>(
    storage: &S,
    header: &Header,
    counts: &[u32],
) -> Result<bool> {
    let geometry = header.geometry;
    let table = read_table(storage, header).await?;
    let has_block = |index: usize| {
        let word = table.get(index).copied().unwrap_or(0);
        matches!(entry::refcount_block(word, geometry), Ok(Some(_)))
    };
    let parts = counts.chunks(geometry.block_refcounts() as usize).enumerate();
    Ok(parts
        .into_iter()
        .all(|(index, part)| part.iter().all(|&count| count == 0) || has_block(index)))
}

/// Sets the refcounts of all refcount blocks; what is beyond `counts` is free. Durable with the next
/// flush.
pub(crate) async fn store_in_place<S: Storage>(
    storage: &S,
    header: &Header,
    counts: &[u32],
) -> Result<()> {
    let geometry = header.geometry;
    let step = geometry.slice_size() as usize;
    for (index, word) in read_table(storage, header).await?.into_iter().enumerate() {
        let Ok(Some(block)) = entry::refcount_block(word, geometry) else { continue };
        let old = table_io::read(storage, block, geometry.cluster_size() as usize).await?;
        let new = block_bytes(geometry, counts, index as u64);
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

/// Makes a new refcount table with these refcounts, grown by those of the table itself, and points the
/// header to it, durably.
///
/// # Errors
/// `NoSpace` when the table would be larger than the format allows; or what the storage answers.
/// Nothing has happened then to what the header points to.
pub(crate) async fn store_anew<S: Storage>(
    storage: &S,
    header: &mut Header,
    counts: &mut Vec<u32>,
) -> Result<()> {
    let geometry = header.geometry;
    let start = counts.len() as u64;
    let (blocks, table_clusters) = plan(geometry, counts);
    if table_clusters << geometry.cluster_bits > MOST_TABLE {
        let what = "the refcount table would be larger than its format allows";
        return Err(Error::new(ErrorKind::NoSpace, what).on(storage.name()));
    }
    counts.resize(counts.len() + blocks.len() + table_clusters as usize, 1);
    let table_offset = geometry.offset_of(start + blocks.len() as u64);
    let mut table = vec![0; (table_clusters << geometry.cluster_bits) as usize / 8];
    for (&index, cluster) in blocks.iter().zip(start..) {
        let offset = geometry.offset_of(cluster);
        table[index as usize] = offset;
        let bytes = block_bytes(geometry, counts, index);
        table_io::write(storage, offset, &bytes, Durability::None).await?;
    }
    let bytes = table_io::bytes_of(&table);
    table_io::write(storage, table_offset, &bytes, Durability::None).await?;
    storage.flush(Sync::Data).await?;
    header.refcount_table_offset = table_offset;
    header.refcount_table_clusters = table_clusters as u32;
    store_header(storage, header).await
}

/// The indexes of the blocks that there must be, and how many clusters their table takes.
fn plan(geometry: Geometry, counts: &[u32]) -> (Vec<u64>, u64) {
    let per_block = geometry.block_refcounts();
    let start = counts.len() as u64;
    let used = counts.chunks(per_block as usize).zip(0..);
    let used: BTreeSet<u64> = used
        .filter(|(part, _)| part.iter().any(|&count| count > 0))
        .map(|(_, index)| index)
        .collect();
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

fn block_bytes(geometry: Geometry, counts: &[u32], index: u64) -> Vec<u8> {
    let mut bytes = vec![0; geometry.cluster_size() as usize];
    let first = (index * geometry.block_refcounts()) as usize;
    let counts = counts.get(first..).unwrap_or_default();
    for (index, &count) in counts.iter().take(geometry.block_refcounts() as usize).enumerate() {
        // A count that cannot be stored is as high as it can be: the cluster is never freed then.
        let count = u64::from(count).min(geometry.most_refcount());
        refcount::set(&mut bytes, geometry.refcount_order, index, count);
    }
    bytes
}

async fn read_table<S: Storage>(storage: &S, header: &Header) -> Result<Vec<u64>> {
    let bytes = (header.refcount_table_clusters as usize) << header.geometry.cluster_bits;
    let table = table_io::read(storage, header.refcount_table_offset, bytes).await?;
    Ok(table_io::words_of(&table))
}

/// Writes the fields of the header that can change, durably.
pub(crate) async fn store_header<S: Storage>(storage: &S, header: &Header) -> Result<()> {
    let block = storage.capabilities().alignment.offset as usize;
    let mut bytes = table_io::read(storage, 0, SECTOR.max(block)).await?;
    header.patch(&mut bytes);
    table_io::write(storage, 0, &bytes, Durability::None).await?;
    storage.flush(Sync::Data).await
}
