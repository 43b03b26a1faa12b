//! Detects truncated files, which are shorter than their image, for example because a copy or
//! download was interrupted.
//!
//! The last cluster may begin in the file and end past the file's end: QEMU writes such files, and
//! the part past the end reads as zeros. A cluster that begins past the end is lost: reads of it
//! fail with `Corrupt`, and never return zeros. The active L1 table is always written whole, so
//! each entry past the end is lost. An image with such a loss is not opened for writing, because
//! new clusters would be allocated at the offsets of the missing part. Therefore the file can still
//! be completed, or repaired; a repair replaces lost clusters by zeros, and removes snapshots whose
//! tables are lost, and all bitmaps if a part of one is lost.
//!
//! To detect a loss, opening an intact image reads at most one refcount block. L2 tables are read
//! only if a cluster past the end may have a nonzero refcount (this is also possible after a
//! crash).

use std::fmt;

use blockhouse_core::{ByteRange, Error, ErrorKind, Result, Storage};

use crate::qcow2::layout::entry::{self, Entry};
use crate::qcow2::layout::geometry::Geometry;
use crate::qcow2::layout::header::Header;
use crate::qcow2::layout::options::Access;
use crate::qcow2::layout::snapshot_table::FIXED;
use crate::qcow2::layout::sparse_reader::SparseReader;
use crate::qcow2::layout::{refcount, table_io, words};

use super::bitmaps;
use super::snapshot_survey::SnapshotSurvey;

/// A known loss of an image's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Truncation {
    /// The offset of a lost cluster or table to which tables refer, in bytes from the start of the
    /// file.
    pub offset: u64,
    /// The length of the file in bytes, which is at most `offset`.
    pub file_size: u64,
}

impl fmt::Display for Truncation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { offset, file_size } = self;
        write!(f, "the file is cut off: data at offset {offset} is past its end at {file_size}")
    }
}

impl Truncation {
    /// The loss as an error with the offset.
    fn error(self, name: &str) -> Error {
        let what = format!(
            "the file is cut off, or a table is damaged: it has {} bytes, and metadata refers to data",
            self.file_size
        );
        Error::new(ErrorKind::Corrupt, what).on(name).at(self.offset).hint(
            "get the whole file again, or read what is left (--read-only); check --repair all makes \
             zeros of lost data and removes lost snapshots and all bitmaps if a part of one is lost, \
             but cannot repair a lost L1 table",
        )
    }
}

/// Whether a table on disk, of the active disk, of snapshots or of bitmaps, refers to a cluster
/// that begins at or after byte `length` of the file, or is there itself. The caller has made all
/// changes durable, and knows that the active L1 table and the refcounts are before `length`.
///
/// # Errors
/// Errors of the storage.
pub(crate) async fn refers_past<S: Storage>(
    storage: &S,
    header: &Header,
    l1: &[u64],
    length: u64,
) -> Result<bool> {
    let search = Search { storage, geometry: header.geometry, file_size: length };
    Ok(search.among_all(header, l1).await?.is_some())
}

/// Searches for a loss of the active disk; if the image is opened for writing, also of snapshots.
///
/// `find` replaces each lost entry of the active L1 table in `l1` by a reference to a cluster past
/// the file's end. So reads of such an entry fail, as reads of a lost L2 table do.
///
/// # Errors
/// `Corrupt` if the image is opened for writing and anything is lost; or errors of the storage.
pub(crate) async fn find<S: Storage>(
    storage: &S,
    header: &Header,
    (l1, refcount_table): (&mut [u64], &[u64]),
    access: Access,
) -> Result<Option<Truncation>> {
    let search = Search { storage, geometry: header.geometry, file_size: storage.size() };
    search.mark_lost_entries(header.l1_offset, l1);
    let found = match search.among_tables(l1, refcount_table) {
        Some(lost) => Some(lost),
        None if search.is_suspicious(refcount_table).await? => match access {
            // New clusters would be allocated at the offsets of a snapshot's lost clusters.
            Access::ReadWrite => search.among_all(header, l1).await?,
            Access::ReadOnly => search.among_clusters(l1).await?,
        },
        None => None,
    };
    match found {
        Some(lost) if access == Access::ReadWrite => Err(lost.error(storage.name())),
        found => Ok(found),
    }
}

struct Search<'a, S> {
    storage: &'a S,
    geometry: Geometry,
    file_size: u64,
}

impl<S: Storage> Search<'_, S> {
    /// Whether the cluster of this byte begins past the end of the file.
    fn is_lost(&self, offset: u64) -> bool {
        self.geometry.cluster_of(offset) >= self.geometry.clusters_for(self.file_size)
    }

    fn lost(&self, offset: u64) -> Truncation {
        Truncation { offset, file_size: self.file_size }
    }

    /// Replaces the lost entries of an L1 table at `offset` by references past the file's end.
    fn mark_lost_entries(&self, offset: u64, l1: &mut [u64]) {
        let end = self.geometry.clusters_for(self.file_size);
        let first_lost = self.file_size.saturating_sub(offset) / 8;
        for (index, word) in (0..).zip(l1).skip(first_lost as usize) {
            let cluster = self.geometry.cluster_of(offset + index * 8).max(end);
            *word = self.geometry.offset_of(cluster);
        }
    }

    /// A lost L2 table or refcount block.
    fn among_tables(&self, l1: &[u64], refcount_table: &[u64]) -> Option<Truncation> {
        let l2 = l1.iter().filter_map(|&word| entry::l1_reference(word, self.geometry).ok()?);
        let blocks = refcount_table
            .iter()
            .filter_map(|&word| entry::refcount_block(word, self.geometry).ok()?);
        let mut offsets = l2.map(|table| table.offset).chain(blocks);
        offsets.find(|&offset| self.is_lost(offset)).map(|offset| self.lost(offset))
    }

    /// Whether a cluster past the end of the file may have a refcount.
    async fn is_suspicious(&self, refcount_table: &[u64]) -> Result<bool> {
        let geometry = self.geometry;
        let end = geometry.clusters_for(self.file_size);
        let at = geometry.refcount_index(end);
        let index = usize::try_from(at.table_index).unwrap_or(usize::MAX);
        let Some((&word, later)) = refcount_table.get(index..).and_then(<[u64]>::split_first)
        else {
            return Ok(false);
        };
        if later.iter().any(|&word| word != 0) {
            return Ok(true);
        }
        let Ok(Some(block)) = entry::refcount_block(word, geometry) else { return Ok(false) };
        let length = geometry.cluster_size() - at.slice_offset;
        let bytes = table_io::read(self.storage, block + at.slice_offset, length as usize).await?;
        Ok(refcount::used_from(&bytes, geometry.refcount_order, at.index).next().is_some())
    }

    /// A lost table, or a lost data cluster to which the active tables or the tables of a snapshot
    /// refer.
    async fn among_all(&self, header: &Header, l1: &[u64]) -> Result<Option<Truncation>> {
        let mut found = self.among_tables(l1, &[]);
        if found.is_none() {
            found = self.among_clusters(l1).await?;
        }
        if found.is_some() {
            return Ok(found);
        }
        let snapshots = SnapshotSurvey::read(self.storage, header).await?;
        found = self.among_other_tables(header, &snapshots).await?;
        if found.is_some() {
            return Ok(found);
        }
        for l1 in snapshots.l1_tables() {
            let bytes = table_io::read(self.storage, l1.offset, l1.length() as usize).await?;
            let l1 = words::words_of(&bytes);
            found = self.among_tables(&l1, &[]);
            if found.is_none() {
                found = self.among_clusters(&l1).await?;
            }
            if found.is_some() {
                break;
            }
        }
        Ok(found)
    }

    /// A lost table of snapshots, or a lost part of bitmaps that are consistent with the disk.
    async fn among_other_tables(
        &self,
        header: &Header,
        snapshots: &SnapshotSurvey,
    ) -> Result<Option<Truncation>> {
        let mut found = None;
        let mut look_at = |offset: u64, length: u64| {
            let last = offset.saturating_add(length.saturating_sub(1));
            if length > 0 && self.is_lost(last) {
                found.get_or_insert(self.lost(last));
            }
        };
        // The entries that are lost have at least their fixed fields.
        let least = u64::from(header.snapshots) * FIXED as u64;
        look_at(header.snapshots_offset, snapshots.length.max(least));
        for l1 in snapshots.l1_tables().chain(snapshots.unusable_l1_tables.iter().copied()) {
            if l1.is_possible(self.geometry) {
                look_at(l1.offset, l1.length());
            }
        }
        let add = |_: &str, offset, length| {
            look_at(offset, length);
            Ok(())
        };
        // A fault of bitmaps prevents no opening: they are lost with the first change.
        let _ = bitmaps::walk(self.storage, header, add).await?;
        Ok(found)
    }

    /// A lost data cluster.
    async fn among_clusters(&self, l1: &[u64]) -> Result<Option<Truncation>> {
        let geometry = self.geometry;
        let tables = l1.iter().filter_map(|&word| entry::l1_reference(word, geometry).ok()?);
        let mut tables: Vec<u64> = tables.map(|table| table.offset).collect();
        tables.sort_unstable();
        tables.dedup();
        let mut reader = SparseReader::new(self.storage, geometry);
        for table in tables {
            let mut rest = ByteRange::between(table, table + geometry.cluster_size());
            while let Some((_, bytes)) = reader.read(&mut rest).await? {
                let entries = bytes.len() / geometry.l2_entry_size() as usize;
                let mut offsets =
                    (0..entries).filter_map(|index| data_offset(&bytes, index, geometry));
                if let Some(offset) = offsets.find(|&offset| self.is_lost(offset)) {
                    return Ok(Some(self.lost(offset)));
                }
            }
        }
        Ok(None)
    }
}

/// The offset in the image's file of the data of an L2 entry; `None` if the entry has no data in
/// that file.
fn data_offset(table: &[u8], index: usize, geometry: Geometry) -> Option<u64> {
    match Entry::read(table, index, geometry).ok()? {
        // The offset of the last byte is returned, because the cluster with that byte begins before
        // the end of an intact file.
        Entry::Compressed(data) => Some(data.offset + data.length.saturating_sub(1)),
        Entry::Standard { host: Some(host), subclusters }
            if subclusters.data != 0 && !geometry.has_data_file =>
        {
            Some(host.offset)
        }
        Entry::Standard { .. } => None,
    }
}
