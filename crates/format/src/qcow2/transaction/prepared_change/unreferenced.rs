//! Frees the clusters to which a deleted snapshot had the last reference, while guests continue.
//!
//! Such clusters have a refcount of one in the new tables, and no reference: a crash leaks the
//! clusters that are not freed yet. The clusters are given to the allocator in batches, so that the
//! memory for pending frees does not depend on the size of the image. When [`Unreferenced`] is
//! dropped, all remaining clusters are given to the allocator at once.

use std::collections::BTreeSet;

use blockhouse_core::{Storage, WorkBudget};

use crate::qcow2::writeback::Metadata;

use super::reference_counts::ReferenceCounts;

/// The number of slices whose clusters are freed together.
const SLICES: usize = 64;

/// The clusters to free; see the module's documentation.
pub(super) struct Unreferenced<'a, S: Storage> {
    metadata: &'a Metadata<S>,
    counts: ReferenceCounts,
    /// Slices of refcounts that may have clusters to free.
    slices: BTreeSet<u64>,
}

impl<'a, S: Storage> Unreferenced<'a, S> {
    /// The clusters without a reference according to `counts`. The active tables must agree with
    /// `counts`, on disk, too.
    pub(super) fn new(metadata: &'a Metadata<S>, counts: ReferenceCounts) -> Self {
        let slices = counts.slices();
        Self { metadata, counts, slices }
    }

    /// Frees the clusters. Errors are recorded as usual, and the remaining clusters are freed
    /// later.
    pub(super) async fn free(mut self) {
        let budget = WorkBudget::new();
        while !self.slices.is_empty() {
            for _ in 0..SLICES {
                self.defer_next();
                budget.spend(WorkBudget::QUANTUM / 4).await;
            }
            if self.metadata.reclaim().await.is_err() {
                break;
            }
        }
    }

    /// Queues the clusters of the next slice to be freed.
    fn defer_next(&mut self) {
        let Some(slice) = self.slices.pop_first() else { return };
        let runs = self.counts.without_any_left(slice);
        if runs.is_empty() {
            return;
        }
        let mut state = self.metadata.lock();
        let state = &mut *state;
        for run in runs {
            // Kept clusters must not get another user: a late write may change a quarantined
            // cluster, and the refcounts of a cluster with an active table are wrong.
            let is_kept = |&cluster: &u64| {
                let is_table = state.tables.check_not_active(cluster).is_err();
                is_table || state.allocator.is_quarantined(cluster)
            };
            let kept: Vec<u64> = run.clone().filter(is_kept).collect();
            let mut start = run.start;
            for cluster in kept.into_iter().chain([run.end]) {
                if start < cluster {
                    state.allocator.frees.defer_unlinked(start..cluster);
                }
                start = cluster + 1;
            }
        }
    }
}

impl<S: Storage> Drop for Unreferenced<'_, S> {
    fn drop(&mut self) {
        while !self.slices.is_empty() {
            self.defer_next();
        }
    }
}
