//! Restores refcounts that are missing on disk when an image is opened: all refcounts of an image
//! with lazy refcounts that was not closed, and the refcounts for a dead process's acknowledged
//! changes (`replay`).
//!
//! A missing refcount block is placed at the end of the file. If the file cannot grow, as on a
//! block device, the block gets an unused cluster, which has no refcount on disk and no reference.

use blockhouse_core::{Error, ErrorKind, Result, Storage, ToolProgress};

use crate::qcow2::allocator::{Allocator, Gaps};
use crate::qcow2::check::disk_refcounts::{DiskRefcounts, merge_counts};
use crate::qcow2::check::references::References;
use crate::qcow2::layout::cluster_ranges::ClusterRanges;
use crate::qcow2::tables::{Step, Tables};
use crate::qcow2::writeback::Metadata;

/// Sets every refcount to the number of references, durably, and marks the image as clean. Places
/// no refcount block in `hosts`, the clusters of a log that is replayed later.
///
/// # Errors
/// `Corrupt` if the tables themselves are damaged. Nothing is changed then.
pub(crate) async fn recount<S: Storage>(
    metadata: &Metadata<S>,
    hosts: &ClusterRanges,
) -> Result<()> {
    let storage = metadata.storage();
    let header = metadata.lock().tables.headers.disk().clone();
    let references = References::count(storage, &header, &ToolProgress::default()).await?;
    if let Some(problem) = references.problems.first() {
        let what = format!("refcounts cannot be rebuilt: {problem}");
        return Err(Error::new(ErrorKind::Corrupt, what)
            .on(storage.name())
            .hint("repair the image (check --repair all)"));
    }
    let counts = &references.counts;
    let on_disk = DiskRefcounts::read(storage, &header).await?;
    let is_taken = |cluster| counts.get(cluster) > 0 || hosts.overlaps(&(cluster..cluster + 1));
    let mut gaps = Gaps::new(whole_clusters(metadata), &is_taken);
    // Lowers refcounts first: a cluster without references is then free for a refcount block.
    for is_raised in [false, true] {
        let wrong = merge_counts(counts, &on_disk)
            .filter(|&(_, count, recorded)| count != recorded && (count > recorded) == is_raised);
        for (cluster, count, _) in wrong {
            let correct = |allocator: &mut Allocator, tables: &mut Tables| {
                allocator.correct_refcount(tables, cluster, u64::from(count))
            };
            change_refcount(metadata, cluster, &mut gaps, correct).await?;
        }
    }
    metadata.write_everything().await?;
    metadata.finish().await
}

/// Runs `change`, which changes the refcount of `cluster`. If the file has no space at its end,
/// places the refcount block in a gap, and runs `change` again.
///
/// # Errors
/// `NoSpace` if there is no gap, either.
pub(super) async fn change_refcount<S: Storage>(
    metadata: &Metadata<S>,
    cluster: u64,
    gaps: &mut Gaps<'_>,
    change: impl Fn(&mut Allocator, &mut Tables) -> Step<()>,
) -> Result<()> {
    let make = || {
        metadata.step(|state| {
            state.tables.check_dirty_limit()?;
            change(&mut state.allocator, &mut state.tables)
        })
    };
    let error = match make().await {
        Err(error) if error.kind() == ErrorKind::NoSpace => error,
        outcome => return outcome,
    };
    let placed = metadata
        .step(|state| state.allocator.place_block_in_gap(&mut state.tables, cluster, gaps))
        .await;
    match placed {
        Ok(()) => make().await,
        Err(other) if other.kind() == ErrorKind::NoSpace => Err(error),
        Err(other) => Err(other),
    }
}

/// The number of whole clusters in the file, without an incomplete last cluster.
pub(super) fn whole_clusters<S: Storage>(metadata: &Metadata<S>) -> u64 {
    metadata.geometry().cluster_of(metadata.storage().size())
}
