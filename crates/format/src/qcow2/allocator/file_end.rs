//! Searches for the last cluster in use when the image is closed, so that the file can be truncated
//! after it.
//!
//! Refcount blocks that count only themselves would prevent the truncation of a file whose data was
//! freed, so the search removes them from the refcount table. The conditions under which the search
//! runs are in `truncate_file` (`open.rs`).

use crate::qcow2::tables::{LastCounted, Step, Tables};

use super::Allocator;
use super::deferred_free::DeferredFree;

/// The maximum number of slices of refcounts that the search examines: 2 TiB of free space with
/// clusters of 64 KiB. Free space before these slices is not found.
const MAX_SLICES: u64 = 1 << 14;

/// A search for the last cluster in use, from the end of the file backwards.
pub(crate) struct BackwardScan {
    /// All clusters from this one on are free.
    below: u64,
    slices_left: u64,
    /// The number of refcount blocks that were removed from the refcount table.
    dropped: u64,
    /// The refcount block that is being examined, and the cluster up to which it counts only
    /// itself. If a slice must be read first, the step ends, and the next step continues there.
    looked: Option<(u64, u64)>,
}

impl BackwardScan {
    /// A search in a file in which no cluster from `below` on is in use.
    pub(crate) fn new(below: u64) -> Self {
        Self { below, slices_left: MAX_SLICES, dropped: 0, looked: None }
    }

    /// A new search from `below`, limited to the number of slices that this search has left.
    pub(crate) fn again(&self, below: u64) -> Self {
        Self { slices_left: self.slices_left, ..Self::new(below) }
    }

    /// Whether refcount blocks were dropped. A block that counted a dropped block may then count
    /// only itself.
    pub(crate) fn has_dropped(&self) -> bool {
        self.dropped > 0
    }

    /// The minimum length of the file in clusters: it includes the header and the active tables,
    /// even if refcounts say that they are free.
    pub(crate) fn clusters_in_use(&self, tables: &Tables) -> u64 {
        let last = tables.active.iter().max();
        last.map_or(self.below, |&last| self.below.max(last + 1))
    }
}

impl Allocator {
    /// Continues the search, and removes refcount blocks that count only themselves; each removal
    /// is a separate change.
    pub(crate) fn scan_backwards(
        &mut self,
        tables: &mut Tables,
        scan: &mut BackwardScan,
    ) -> Step<()> {
        let geometry = tables.geometry();
        // The refcount table has no entries for clusters from here on, so they are free.
        let countable = tables.refcount_table().len() as u64 * geometry.block_refcounts();
        scan.below = scan.below.min(countable.max(1));
        while scan.below > 0 && scan.slices_left > 0 {
            match tables.refcounts().last_counted(scan.below - 1)? {
                LastCounted::NoRefcountBlock(first) => {
                    scan.below = first;
                    continue;
                }
                LastCounted::NoneFrom(first) => {
                    scan.below = first;
                    scan.slices_left -= 1;
                    continue;
                }
                LastCounted::Cluster(last) => scan.below = last + 1,
            }
            if !self.drop_empty_block(tables, scan.below - 1, &mut scan.looked)? {
                return Ok(());
            }
            scan.below -= 1;
            scan.dropped += 1;
            // The examined slices are subtracted from the limit, because there may be hundreds of
            // thousands of such blocks.
            let slices = geometry.block_refcounts() / geometry.slice_refcounts();
            scan.slices_left = scan.slices_left.saturating_sub(slices);
        }
        Ok(())
    }

    /// Removes the refcount block in this cluster from the refcount table if the block counts no
    /// other cluster. Returns whether the block was removed.
    fn drop_empty_block(
        &mut self,
        tables: &mut Tables,
        cluster: u64,
        looked: &mut Option<(u64, u64)>,
    ) -> Step<bool> {
        let geometry = tables.geometry();
        let offset = geometry.offset_of(cluster);
        if !tables.active.contains(&cluster) {
            return Ok(false);
        }
        let index = tables.refcount_table().words().iter().rposition(|&word| word == offset);
        let Some(index) = index else { return Ok(false) };
        let first = index as u64 * geometry.block_refcounts();
        let counted = first..first + geometry.block_refcounts();
        let seen = looked.filter(|&(block, _)| block == cluster).map_or(first, |(_, seen)| seen);
        for start in (seen..counted.end).step_by(geometry.slice_refcounts() as usize) {
            *looked = Some((cluster, start));
            if tables.refcounts().counts_other(start, cluster)? != Some(false) {
                return Ok(false);
            }
        }
        tables.refcounts().remove_block(index);
        if !counted.contains(&cluster) {
            self.frees.defer(DeferredFree::of(cluster..cluster + 1));
        }
        Ok(true)
    }

    /// Records that the file was truncated to this many clusters.
    pub(crate) fn note_cut(&mut self, tables: &mut Tables, clusters: u64) {
        tables.file.cut(clusters);
        let _ = self.prepared.take_all();
        self.space.cut(clusters);
    }
}
