//! The known free clusters: runs that became free, and the part that was not scanned since the
//! image was opened. Which clusters are free, refcounts say (`tables`); where the file ends,
//! [`FileEnd`](crate::qcow2::tables::FileEnd) does.

use std::collections::BTreeMap;
use std::ops::Range;

/// How many runs of free clusters are remembered. What is beyond is found again by the cursor of
/// the next opening.
const MAX_RUNS: usize = 1 << 16;

/// See the module's page.
pub(crate) struct FreeSpace {
    /// Clusters below this have been scanned.
    cursor: u64,
    /// Where the cursor stops: the end of the file when it was opened.
    scan_end: u64,
    /// Clusters that are in use up to here were written, or were there when the image was opened.
    written_end: u64,
    /// How many clusters the file has, or would have if the storage could be made longer.
    length: u64,
    /// How many bytes the storage had when it could not be made longer: maybe it never can be.
    limit: Option<u64>,
    /// First cluster and length of runs that became free. Only of what the cursor has passed.
    free_runs: BTreeMap<u64, u64>,
}

impl FreeSpace {
    /// Of a file of this many clusters.
    pub(crate) fn new(clusters: u64) -> Self {
        Self {
            cursor: 0,
            scan_end: clusters,
            written_end: clusters,
            length: clusters,
            limit: None,
            free_runs: BTreeMap::new(),
        }
    }

    /// Clusters up to `end` were written.
    pub(crate) fn note_written(&mut self, end: u64) {
        self.written_end = self.written_end.max(end);
    }

    pub(crate) fn written_end(&self) -> u64 {
        self.written_end
    }

    /// The file was made this long, or cannot be.
    pub(crate) fn set_length(&mut self, clusters: u64) {
        self.length = self.length.max(clusters);
    }

    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// The storage could not be made longer than these bytes by itself; `None`: it could.
    pub(crate) fn set_limit(&mut self, limit: Option<u64>) {
        self.limit = limit;
    }

    pub(crate) fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// Nothing is counted from `cluster` on, which the cursor has reached.
    pub(crate) fn end_scan_at(&mut self, cluster: u64) {
        (self.cursor, self.scan_end) = (cluster, cluster);
    }

    /// Where the cursor stops: all that was taken from the end of the file lies beyond.
    pub(crate) fn scan_end(&self) -> u64 {
        self.scan_end
    }

    /// Nothing is counted from `cluster` on: what follows is taken from the end.
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

    /// The file ends here now, after the last cluster in use.
    pub(crate) fn cut(&mut self, end: u64) {
        self.forget_runs_from(end);
        self.length = end;
        self.scan_end = self.scan_end.min(end);
        self.written_end = self.written_end.min(end);
    }

    /// How many clusters of the runs are before `end`.
    pub(crate) fn free_before(&self, end: u64) -> u64 {
        self.free_runs.range(..end).map(|(&start, &count)| count.min(end - start)).sum()
    }

    /// The first run that became free, and how many clusters it has.
    pub(crate) fn first_free_run(&self) -> Option<(u64, u64)> {
        self.free_runs.first_key_value().map(|(&start, &count)| (start, count))
    }

    /// The clusters that were not scanned since the image was opened.
    pub(crate) fn unscanned(&self) -> Range<u64> {
        self.cursor.min(self.scan_end)..self.scan_end
    }

    /// Clusters up to `end` have been scanned.
    pub(crate) fn advance_cursor(&mut self, end: u64) {
        self.cursor = end;
    }

    /// The cluster is free.
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

    /// These clusters are free, which no run has yet and the cursor has not to pass.
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
