//! Tracks the known free clusters (the runs that became free), and the clusters that were not
//! scanned since the image was opened. Refcounts (`tables`) define which clusters are free.
//! [`FileEnd`](crate::qcow2::tables::FileEnd) defines the end of the file.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::qcow2::layout::geometry::Geometry;

/// The maximum number of runs of free clusters in memory. Further runs are not recorded; the scan
/// after the next open finds them.
const MAX_RUNS: usize = 1 << 16;

/// Maximum number of refcount slices that one allocation scans before it uses the end of the file,
/// unless extending the storage failed.
const SLICES_PER_ALLOCATION: u32 = 4;

/// The runs of free clusters, and the range that is still to be scanned; see the module's
/// documentation.
pub(crate) struct FreeSpace {
    /// All clusters before this one have been scanned.
    cursor: u64,
    /// The cluster where the cursor stops: at first, the end of the file when the image was opened.
    scan_end: u64,
    /// All clusters in use before this one were written, or existed when the image was opened.
    written_end: u64,
    /// Length of the file in clusters, including extensions that failed.
    length: u64,
    /// The storage's size in bytes when extending it in advance failed. Writes may still make the
    /// storage longer.
    limit: Option<u64>,
    /// First cluster and length of each free run, without clusters that the cursor scans later.
    free_runs: BTreeMap<u64, u64>,
    /// Whether an allocation has begun.
    has_begun: bool,
    /// The number of refcount slices that the present allocation may still scan.
    slices_left: u32,
}

impl FreeSpace {
    /// A state for a file of this many clusters, none of them scanned.
    pub(crate) fn new(clusters: u64) -> Self {
        Self {
            cursor: 0,
            scan_end: clusters,
            written_end: clusters,
            length: clusters,
            limit: None,
            free_runs: BTreeMap::new(),
            has_begun: false,
            slices_left: SLICES_PER_ALLOCATION,
        }
    }

    /// Records that an allocation has begun. Returns whether it is the first one.
    pub(crate) fn begin_allocation(&mut self) -> bool {
        !std::mem::replace(&mut self.has_begun, true)
    }

    /// Whether the present allocation may scan another slice.
    pub(crate) fn may_scan(&self) -> bool {
        self.slices_left > 0 || self.limit.is_some()
    }

    /// Records that a slice without free clusters was scanned.
    pub(crate) fn note_scanned(&mut self) {
        self.slices_left = self.slices_left.saturating_sub(1);
    }

    /// Records that the present allocation has got its clusters.
    pub(crate) fn end_allocation(&mut self) {
        self.slices_left = SLICES_PER_ALLOCATION;
    }

    /// Records that clusters up to `end` were written.
    pub(crate) fn note_written(&mut self, end: u64) {
        self.written_end = self.written_end.max(end);
    }

    pub(crate) fn written_end(&self) -> u64 {
        self.written_end
    }

    /// Records that the file was extended to `clusters`, or that the extension failed.
    pub(crate) fn set_length(&mut self, clusters: u64) {
        self.length = self.length.max(clusters);
    }

    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// Sets the size in bytes past which extending the file in advance failed; `None` if no
    /// extension failed.
    pub(crate) fn set_limit(&mut self, limit: Option<u64>) {
        self.limit = limit;
    }

    pub(crate) fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// The first cluster that does not lie entirely within the storage, if extending the storage
    /// failed.
    pub(crate) fn host_limit(&self, geometry: Geometry) -> u64 {
        self.limit.map_or(u64::MAX, |bytes| bytes >> geometry.cluster_bits)
    }

    /// The cluster where the cursor stops. All clusters that were taken from the end of the file
    /// lie after it.
    pub(crate) fn scan_end(&self) -> u64 {
        self.scan_end
    }

    /// Ends the scan and the free runs at `cluster`, because no refcount block counts the clusters
    /// from there on. These clusters are allocated as the end of the file.
    pub(crate) fn end_at(&mut self, cluster: u64) {
        self.forget_runs_from(cluster);
        self.scan_end = self.scan_end.min(cluster);
    }

    fn forget_runs_from(&mut self, end: u64) {
        self.free_runs.split_off(&end);
        if let Some(mut last) = self.free_runs.last_entry() {
            let start = *last.key();
            *last.get_mut() = (*last.get()).min(end - start);
        }
    }

    /// Records that the file was cut to `end`, after the last cluster in use.
    pub(crate) fn cut(&mut self, end: u64) {
        self.forget_runs_from(end);
        self.length = end;
        self.scan_end = self.scan_end.min(end);
        self.written_end = self.written_end.min(end);
    }

    /// The number of clusters in runs before `end`.
    pub(crate) fn free_before(&self, end: u64) -> u64 {
        self.free_runs.range(..end).map(|(&start, &count)| count.min(end - start)).sum()
    }

    /// First cluster and length of the first run.
    pub(crate) fn first_free_run(&self) -> Option<(u64, u64)> {
        self.free_runs.first_key_value().map(|(&start, &count)| (start, count))
    }

    /// The clusters that were not scanned since the image was opened.
    pub(crate) fn unscanned(&self) -> Range<u64> {
        self.cursor.min(self.scan_end)..self.scan_end
    }

    /// Records that clusters up to `end` have been scanned.
    pub(crate) fn advance_cursor(&mut self, end: u64) {
        self.cursor = end;
    }

    /// Records a free cluster, unless the cursor scans it later.
    pub(crate) fn free(&mut self, cluster: u64) {
        if (self.cursor..self.scan_end).contains(&cluster) {
            return;
        }
        let before =
            self.free_runs.range(..cluster).next_back().map(|(&start, &count)| (start, count));
        let mut run = (cluster, 1);
        if let Some((start, count)) = before
            && start + count == cluster
        {
            run = (start, count + 1);
        }
        if let Some(count) = self.free_runs.remove(&(cluster + 1)) {
            run.1 += count;
        }
        if self.free_runs.len() < MAX_RUNS || self.free_runs.contains_key(&run.0) {
            self.free_runs.insert(run.0, run.1);
        }
    }

    /// Records free clusters that are in no run yet, and that the cursor does not scan later.
    pub(crate) fn free_range(&mut self, clusters: Range<u64>) {
        if !clusters.is_empty() && self.free_runs.len() < MAX_RUNS {
            self.free_runs.insert(clusters.start, clusters.end - clusters.start);
        }
    }

    /// Removes the first clusters of the run at `start`.
    pub(crate) fn take_from_run(&mut self, start: u64, count: u64) {
        if let Some(length) = self.free_runs.remove(&start)
            && count < length
        {
            self.free_runs.insert(start + count, length - count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_clusters_join_their_neighbours() {
        let mut space = FreeSpace::new(0);
        for cluster in [5, 7, 6, 9] {
            space.free(cluster);
        }
        assert_eq!(space.free_runs.iter().collect::<Vec<_>>(), [(&5, &3), (&9, &1)]);
        space.take_from_run(5, 2);
        assert_eq!(space.free_runs.iter().collect::<Vec<_>>(), [(&7, &1), (&9, &1)]);
    }

    #[test]
    fn clusters_that_the_cursor_has_not_passed_are_not_remembered() {
        let mut space = FreeSpace::new(10);
        space.cursor = 4;
        for cluster in [3, 4, 9, 10] {
            space.free(cluster);
        }
        assert_eq!(space.free_runs.keys().collect::<Vec<_>>(), [&3, &10]);
    }
}
