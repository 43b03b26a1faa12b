//! Removes unusable snapshots from an image, so that the rest of the image can be used again.
//!
//! A snapshot is removed only if its L1 table cannot be found: its entry is invalid or cannot be
//! read, or the clusters at the table's offset have another user and do not contain an L1 table.
//! The other snapshots remain; faults of their entries are corrected. The new table is durable
//! before one write of the header switches to it; if the remaining snapshots are the first ones of
//! the old table, that table is kept. So after a crash the image has either the old snapshots or
//! the new ones.

use blockhouse_core::{
    ByteRange, Durability, Error, ErrorKind, Result, Storage, SyncMode, ToolProgress,
};

use crate::qcow2::layout::header::Header;
use crate::qcow2::layout::limits::MAX_OFFSET;
use crate::qcow2::layout::snapshot_table::{self, SnapshotEntry};
use crate::qcow2::layout::sparse_reader::SparseReader;
use crate::qcow2::layout::{entry, table_io, words};

use super::counts::Counts;
use super::refcount_rewrite::store_header;
use super::references::References;
use super::snapshot_survey::{L1Location, SnapshotSurvey};

/// Repairs the snapshot table, durably. Returns descriptions of the faults and of the removed
/// snapshots.
///
/// # Errors
/// `NoSpace` if there is no space for a new table; or errors of the storage.
pub(crate) async fn repair_snapshots<S: Storage>(
    storage: &S,
    header: &mut Header,
) -> Result<Vec<String>> {
    let mut survey = SnapshotSurvey::read(storage, header).await?;
    let mut said: Vec<String> = survey.faults.iter().map(|fault| fault.what.clone()).collect();
    remove_misplaced(storage, header, &mut survey, &mut said).await?;
    if said.is_empty() {
        return Ok(said);
    }
    if survey.usable.is_empty() {
        header.snapshots_offset = 0;
    } else if !survey.is_prefix {
        header.snapshots_offset = store_table(storage, header, &survey.usable).await?;
    }
    header.snapshots = survey.usable.len() as u32;
    header.snapshot_fault = None;
    store_header(storage, header).await?;
    Ok(said)
}

/// Removes snapshots whose L1 offset refers to other data: the clusters there have another user,
/// and contain entries that no L1 table has. Such clusters must not be repaired as a table.
async fn remove_misplaced<S: Storage>(
    storage: &S,
    header: &Header,
    survey: &mut SnapshotSurvey,
    said: &mut Vec<String>,
) -> Result<()> {
    if survey.usable.is_empty() {
        return Ok(());
    }
    let counts = References::count(storage, header, &ToolProgress::default()).await?.counts;
    let mut left = Vec::new();
    for snapshot in std::mem::take(&mut survey.usable) {
        let location = L1Location::of(&snapshot);
        if is_shared(location, header, &counts) && !is_l1_table(storage, header, location).await? {
            let (called, offset) = (snapshot.called(), location.offset);
            said.push(format!("{called} cannot be used: there is no L1 table at offset {offset}"));
            survey.is_prefix = false;
        } else {
            left.push(snapshot);
        }
    }
    survey.usable = left;
    Ok(())
}

fn is_shared(location: L1Location, header: &Header, counts: &Counts) -> bool {
    counts.range(location.clusters(header.geometry)).any(|(_, count)| count > 1)
}

/// Whether all entries are valid for an L1 table.
async fn is_l1_table<S: Storage>(
    storage: &S,
    header: &Header,
    location: L1Location,
) -> Result<bool> {
    let size = storage.size();
    let mut reader = SparseReader::new(storage, header.geometry);
    let mut rest = ByteRange::between(location.offset, location.offset + location.length());
    while let Some((_, bytes)) = reader.read(&mut rest).await? {
        let is_entry = |word: u64| match entry::l1_reference(word, header.geometry) {
            Ok(table) => table.is_none_or(|table| table.offset < size),
            Err(_) => false,
        };
        if !words::words_of(&bytes).into_iter().all(is_entry) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Stores a table past the end of the file, durably; returns its offset.
async fn store_table<S: Storage>(
    storage: &S,
    header: &Header,
    snapshots: &[SnapshotEntry],
) -> Result<u64> {
    let geometry = header.geometry;
    let mut bytes = snapshot_table::to_bytes(snapshots);
    bytes.resize(bytes.len().next_multiple_of(geometry.cluster_size() as usize), 0);
    let offset = geometry.offset_of(geometry.clusters_for(storage.size()));
    if offset > MAX_OFFSET - bytes.len() as u64 {
        let what = "the file is too long for a new snapshot table";
        return Err(Error::new(ErrorKind::NoSpace, what).on(storage.name()));
    }
    table_io::write(storage, offset, &bytes, Durability::None).await?;
    storage.flush(SyncMode::Data).await?;
    Ok(offset)
}
