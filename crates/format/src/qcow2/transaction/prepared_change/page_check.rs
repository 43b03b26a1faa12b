//! Bounds the memory of the reference counters in an inconsistent image.
//!
//! A page of counters is as large as 256 L2 entries, so L2 entries that refer to scattered clusters
//! would cost far more memory than they take in the file. But a cluster in use has a refcount, so
//! each page must have a slice of refcounts that is not all zeros. A few pages may lack such a
//! slice, if guests have freed clusters since the references were counted.

use blockhouse_core::{Result, Storage};
use futures_util::stream::{self, StreamExt};

use crate::qcow2::layout::entry;
use crate::qcow2::tables::SliceKind;
use crate::qcow2::writeback::Metadata;

use super::reference_counts::ReferenceCounts;
use super::space::Halt;
use super::table_parts::{MAX_SLICES_IN_FLIGHT, Notes, Part, look};

/// The number of new pages at which they are checked together.
const PAGES: usize = 1024;

/// Checks the refcounts of new pages, if there are many.
///
/// # Errors
/// `Implausible` if most of the new pages have no refcount other than 0.
pub(super) async fn check_new_pages<S: Storage>(
    metadata: &Metadata<S>,
    counts: &mut ReferenceCounts,
) -> Result<(), Halt> {
    if counts.new_pages() < PAGES {
        return Ok(());
    }
    let slices = counts.take_new_pages();
    let table = metadata.lock().tables.refcount_table().to_vec();
    let looks = slices.iter().map(|&slice| has_refcounts(metadata, &table, slice));
    let looks: Vec<Result<bool>> =
        stream::iter(looks).buffered(MAX_SLICES_IN_FLIGHT).collect().await;
    let mut counted = 0;
    for has_any in looks {
        counted += usize::from(has_any?);
    }
    if counted * 2 < slices.len() { Err(Halt::Implausible) } else { Ok(()) }
}

/// Whether any refcount of a slice is not 0.
async fn has_refcounts<S: Storage>(
    metadata: &Metadata<S>,
    table: &[u64],
    slice: u64,
) -> Result<bool> {
    let geometry = metadata.geometry();
    let in_block = geometry.cluster_size() / geometry.slice_size();
    let word = table.get((slice / in_block) as usize).copied().unwrap_or(0);
    let Ok(Some(block)) = entry::refcount_block(word, geometry) else { return Ok(false) };
    let offset = block + slice % in_block * geometry.slice_size();
    let part = Part { kind: SliceKind::Refcounts, offset, length: geometry.slice_size() };
    let bytes = look(metadata, part, Notes::Leave).await?;
    Ok(bytes.iter().any(|&byte| byte != 0))
}
