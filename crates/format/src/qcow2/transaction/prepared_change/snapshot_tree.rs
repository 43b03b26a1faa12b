//! Counts the references of a snapshot to be deleted: to its L2 tables, and to the clusters of
//! these tables.
//!
//! A snapshot's tables are never changed in place, so they are counted once. If another transaction
//! has run meanwhile, it may have changed the snapshots, and all references are counted again.

use blockhouse_core::{Result, Storage};
use futures_util::stream::{self, StreamExt};

use crate::qcow2::layout::entry::Reference;
use crate::qcow2::layout::snapshot_table::{self, SnapshotEntry};
use crate::qcow2::layout::{table_io, words};
use crate::qcow2::tables::SliceKind;
use crate::qcow2::writeback::Metadata;

use super::super::metadata_transaction::references;
use super::super::snapshots::index_of;
use super::l2_references::{L2References, Located};
use super::page_check::check_new_pages;
use super::reference_counts::ReferenceCounts;
use super::space::{Halt, check_wanted};
use super::table_parts::{MAX_IN_FLIGHT, Part, read};

/// Counts the references of the snapshot of this name.
pub(super) async fn count_snapshot<S: Storage>(
    metadata: &Metadata<S>,
    name: &str,
    counts: &mut ReferenceCounts,
    is_cancelled: &dyn Fn() -> bool,
) -> Result<(), Halt> {
    let header = metadata.lock().tables.headers.disk().clone();
    let table = snapshot_table::read(metadata.storage(), &header).await?;
    let entry = &table.entries[index_of(metadata.storage().name(), name, &table.entries)?];
    let l1 = read_l1(metadata, entry).await?;
    let tables: Vec<Reference> = references(metadata, &l1)?.into_iter().flatten().collect();
    for some in tables.chunks(MAX_IN_FLIGHT) {
        check_wanted(is_cancelled)?;
        count_tables(metadata, some, counts).await?;
    }
    Ok(())
}

async fn read_l1<S: Storage>(metadata: &Metadata<S>, entry: &SnapshotEntry) -> Result<Vec<u64>> {
    let length = entry.l1_entries as usize * 8;
    Ok(words::words_of(&table_io::read(metadata.storage(), entry.l1_offset, length).await?))
}

async fn count_tables<S: Storage>(
    metadata: &Metadata<S>,
    tables: &[Reference],
    counts: &mut ReferenceCounts,
) -> Result<(), Halt> {
    let geometry = metadata.geometry();
    let reads = tables.iter().map(async |table| {
        let length = geometry.cluster_size();
        read(metadata, Part { kind: SliceKind::L2, offset: table.offset, length }).await
    });
    let reads: Vec<Result<Vec<u8>>> = stream::iter(reads).buffered(MAX_IN_FLIGHT).collect().await;
    let entries = L2References::new(geometry);
    for (table, bytes) in tables.iter().zip(reads) {
        let (name, offset) = (metadata.storage().name(), table.offset);
        counts.add(geometry.cluster_of(offset));
        entries.count(Located { bytes: &bytes?, name, offset }, counts).await?;
        check_new_pages(metadata, counts).await?;
    }
    Ok(())
}
