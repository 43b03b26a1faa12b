//! The clusters of persistent bitmaps in the file, and the repair of bitmaps.
//!
//! Clusters of bitmaps count as used only while the autoclear bit states that the bitmaps are
//! consistent with the disk. Without the bit QEMU treats the clusters as leaked, and so does a
//! check.

use blockhouse_core::{ByteRange, Durability, ErrorKind, Result, Storage, SyncMode};

use crate::qcow2::layout::bitmap_directory::{
    self, BitmapEntry, BitmapFlags, BitsCluster, DirectoryLocation,
};
use crate::qcow2::layout::cluster_ranges::ClusterRanges;
use crate::qcow2::layout::header::Header;
use crate::qcow2::layout::sparse_reader::SparseReader;
use crate::qcow2::layout::{table_io, words};

use super::counts::Counts;

/// Calls `add` with the description, offset and length of each part of the file that bitmaps use.
/// Returns a fault, as text, if `add` may not have been called for all parts.
///
/// # Errors
/// Only errors of the storage and of `add`.
pub(crate) async fn walk<S: Storage>(
    storage: &S,
    header: &Header,
    mut add: impl FnMut(&str, u64, u64) -> Result<()>,
) -> Result<Option<String>> {
    let location = match DirectoryLocation::of(header) {
        Ok(Some(location)) => location,
        Ok(None) => return Ok(None),
        Err(fault) => return Ok(Some(fault)),
    };
    let DirectoryLocation { count, length, offset } = location;
    add("the directory of bitmaps", offset, length)?;
    if offset.saturating_add(length) > storage.size() {
        return Ok(Some("the directory of bitmaps is past the end of the file".into()));
    }
    let directory = table_io::read(storage, offset, length as usize).await?;
    let entries = match bitmap_directory::parse(&directory, header, count) {
        Ok(entries) => entries,
        Err(fault) => return Ok(Some(fault)),
    };
    let mut tables = ClusterRanges::default();
    let mut reader = SparseReader::new(storage, header.geometry);
    for entry in entries {
        if let Some(fault) = walk_table(&mut reader, header, &entry, &mut tables, &mut add).await? {
            return Ok(Some(format!("{} {fault}", entry.called())));
        }
    }
    Ok(None)
}

async fn walk_table<S: Storage>(
    reader: &mut SparseReader<'_, S>,
    header: &Header,
    entry: &BitmapEntry,
    tables: &mut ClusterRanges,
    add: &mut impl FnMut(&str, u64, u64) -> Result<()>,
) -> Result<Option<String>> {
    let geometry = header.geometry;
    let (table, bytes) = (entry.table_offset, entry.table_length());
    let clusters = geometry.cluster_of(table)..geometry.clusters_for(table + bytes);
    if tables.overlaps(&clusters) {
        return Ok(Some(format!("has a table at offset {table} that overlaps another one")));
    }
    tables.insert(clusters);
    add("a bitmap's table", table, bytes)?;
    let mut rest = ByteRange::between(table, table + bytes);
    while let Some((data, table)) = reader.read(&mut rest).await? {
        for (at, word) in (data.offset()..).step_by(8).zip(words::words_of(&table)) {
            match BitsCluster::parse(word, geometry) {
                Ok(BitsCluster::Zeros | BitsCluster::Ones) => {}
                Ok(BitsCluster::Stored(offset)) => {
                    add("a bitmap's bits", offset, geometry.cluster_size())?;
                }
                Err(fault) => {
                    return Ok(Some(format!("has an entry at offset {at} that {fault}")));
                }
            }
        }
    }
    Ok(None)
}

/// Whether the tables of bitmaps have a fault, or a part of a bitmap ends past the end of the file.
///
/// # Errors
/// Only errors of the storage.
pub(super) async fn are_damaged<S: Storage>(storage: &S, header: &Header) -> Result<bool> {
    let clusters = header.geometry.clusters_for(storage.size());
    let mut is_past_end = false;
    let add = |_: &str, offset: u64, length: u64| {
        is_past_end |= header.geometry.clusters_for(offset.saturating_add(length)) > clusters;
        Ok(())
    };
    let fault = walk(storage, header, add).await?;
    Ok(is_past_end || fault.is_some())
}

/// Marks the whole disk as changed in the enabled bitmaps, durably, before a repair changes the
/// disk's content. Overwrites the bitmap tables in place: the clusters of their bits leak. Returns
/// false if this is impossible, because a table is past the end of the file, its clusters have
/// another user, or bitmaps are corrupt.
///
/// # Errors
/// Only errors of the storage.
pub(super) async fn mark_all<S: Storage>(
    storage: &S,
    header: &Header,
    counts: &Counts,
) -> Result<bool> {
    let entries = match bitmap_directory::read(storage, header).await {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::Corrupt => return Ok(false),
        Err(error) => return Err(error),
    };
    let is_live = |entry: &&BitmapEntry| {
        entry.flags.contains(BitmapFlags::AUTO) && !entry.is_inconsistent(header)
    };
    let geometry = header.geometry;
    let block = u64::from(storage.capabilities().alignment.offset);
    for entry in entries.iter().filter(is_live) {
        let (offset, length) = (entry.table_offset, entry.table_length());
        let mut clusters = geometry.cluster_of(offset)..geometry.clusters_for(offset + length);
        if offset + length > storage.size() || clusters.any(|cluster| counts.get(cluster) != 1) {
            return Ok(false);
        }
        let mut table = vec![BitsCluster::Ones.word(); entry.table_entries as usize];
        table.resize(length.next_multiple_of(block.max(8)) as usize / 8, 0);
        let write = words::bytes_of(&table);
        table_io::write(storage, offset, &write, Durability::None).await?;
    }
    storage.flush(SyncMode::Data).await?;
    Ok(true)
}
