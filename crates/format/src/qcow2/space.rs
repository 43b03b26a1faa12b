//! Where free clusters are, as far as that is remembered: what was given back, what has not been looked
//! at since the image was opened, the end of the file. Who is counted how often is told by refcounts
//! (see `alloc`).

use std::collections::BTreeMap;
use std::ops::Range;

/// How many runs of given-back clusters are remembered. What is beyond is found again by the cursor
/// of the next opening.
const MAX_RUNS: usize = 1 << 16;

/// Where free space is.
pub(crate) struct Space {
    /// Clusters below this have been looked at.
    cursor: u64,
    /// Where the cursor stops: the end of the file when it was opened.
    scan_end: u64,
    /// New clusters are taken from here on.
    end: u64,
    /// What is taken up to here was written, or there when the image was opened.
    filled: u64,
    /// How many clusters the file has, or would have if it could.
    length: u64,
    /// How many clusters the file had when the image was opened: those from here on read as zeros until
    /// they are written.
    opened: u64,
    /// How many bytes the storage had when it could not be made longer: maybe it never can be.
    limit: Option<u64>,
    /// Whether clusters were taken or freed.
    has_changed: bool,
    /// Given back: first cluster and how many. Only of what the cursor does not come by any more.
    runs: BTreeMap<u64, u64>,
}

impl Space {
    /// Of a file of so many clusters.
    pub(crate) fn new(clusters: u64) -> Self {
        Self {
            cursor: 0,
            scan_end: clusters,
            end: clusters,
            filled: clusters,
            length: clusters,
            opened: clusters,
            limit: None,
            has_changed: false,
            runs: BTreeMap::new(),
        }
    }

    /// Nothing lies in clusters from here on.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Clusters up to `end` were written.
    pub(crate) fn fill_to(&mut self, end: u64) {
        self.filled = self.filled.max(end);
    }

    /// Whether the file grows by what is being written.
    pub(crate) fn is_growing(&self) -> bool {
        self.filled < self.end
    }

    /// The file was made this long, or cannot be.
    pub(crate) fn set_length(&mut self, clusters: u64) {
        self.length = self.length.max(clusters);
    }

    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// Clusters from here on are in no file.
    pub(crate) fn bound(&self) -> u64 {
        self.end.max(self.opened)
    }

    /// Whether new clusters from `start` on read as zeros.
    pub(crate) fn reads_as_zeros(&self, start: u64) -> bool {
        start >= self.opened
    }

    /// The storage could not be made longer than these bytes by itself; `None`: it could.
    pub(crate) fn set_limit(&mut self, limit: Option<u64>) {
        self.limit = limit;
    }

    pub(crate) fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// Clusters were taken or freed.
    pub(crate) fn note_change(&mut self) {
        self.has_changed = true;
    }

    pub(crate) fn has_changed(&self) -> bool {
        self.has_changed
    }

    /// Nothing is counted from `cluster` on, which the cursor has reached: new clusters are taken from
    /// there on, unless some were taken behind it already.
    pub(crate) fn end_scan_at(&mut self, cluster: u64) {
        (self.cursor, self.scan_end) = (cluster, cluster);
        if self.end == self.opened {
            self.end = cluster;
        }
    }

    /// The file ends here now, behind the last cluster in use.
    pub(crate) fn cut(&mut self, end: u64) {
        self.runs.split_off(&end);
        if let Some(mut last) = self.runs.last_entry() {
            let start = *last.key();
            *last.get_mut() = (*last.get()).min(end - start);
        }
        (self.end, self.length, self.opened) = (end, end, end);
        self.scan_end = self.scan_end.min(end);
        self.filled = self.filled.min(end);
    }

    /// Takes `count` clusters from the end without counting them.
    pub(crate) fn claim(&mut self, count: u64) -> Range<u64> {
        let start = self.end;
        self.end += count;
        start..self.end
    }

    /// Clusters up to here are taken, or not to be had.
    pub(crate) fn reach(&mut self, end: u64) {
        self.end = self.end.max(end);
    }

    /// The clusters from `start` up to the end, if that is `end`, are not in use after all.
    pub(crate) fn unclaim(&mut self, end: u64, start: u64) {
        if self.end == end {
            self.end = start;
        }
    }

    /// The first clusters that were given back, and how many they are.
    pub(crate) fn given_back(&self) -> Option<(u64, u64)> {
        self.runs.first_key_value().map(|(&start, &count)| (start, count))
    }

    /// The clusters that nobody has looked at since the image was opened.
    pub(crate) fn unseen(&self) -> Range<u64> {
        self.cursor.min(self.scan_end)..self.scan_end
    }

    /// Clusters up to `end` have been looked at.
    pub(crate) fn see_to(&mut self, end: u64) {
        self.cursor = end;
    }

    /// Nobody has the cluster any more.
    pub(crate) fn give_back(&mut self, cluster: u64) {
        if (self.cursor..self.scan_end).contains(&cluster) {
            return;
        }
        let before = self.runs.range(..cluster).next_back().map(|(&start, &count)| (start, count));
        let mut run = (cluster, 1);
        if let Some((start, count)) = before
            && start + count == cluster
        {
            run = (start, count + 1);
        }
        if let Some(count) = self.runs.remove(&(cluster + 1)) {
            run.1 += count;
        }
        if self.runs.len() < MAX_RUNS || self.runs.contains_key(&run.0) {
            self.runs.insert(run.0, run.1);
        }
    }

    /// Removes the first clusters of the run at `start`.
    pub(crate) fn take_from_run(&mut self, start: u64, count: u64) {
        if let Some(length) = self.runs.remove(&start)
            && count < length
        {
            self.runs.insert(start + count, length - count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn given_back_clusters_join_their_neighbours() {
        let mut space = Space::new(0);
        for cluster in [5, 7, 6, 9] {
            space.give_back(cluster);
        }
        assert_eq!(space.runs.iter().collect::<Vec<_>>(), [(&5, &3), (&9, &1)]);
        space.take_from_run(5, 2);
        assert_eq!(space.runs.iter().collect::<Vec<_>>(), [(&7, &1), (&9, &1)]);
    }

    #[test]
    fn what_the_cursor_will_come_by_is_not_remembered() {
        let mut space = Space::new(10);
        space.cursor = 4;
        for cluster in [3, 4, 9, 10] {
            space.give_back(cluster);
        }
        assert_eq!(space.runs.keys().collect::<Vec<_>>(), [&3, &10]);
    }
}
