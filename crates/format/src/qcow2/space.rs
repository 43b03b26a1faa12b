//! Where free clusters are, as far as that is remembered: what was given back, what has not been looked
//! at since the image was opened, the end of the file. Who is counted how often is told by refcounts
//! (see `alloc`).

use std::collections::BTreeMap;
use std::ops::Range;

/// How many runs of given-back clusters are remembered. What is beyond is found again by the cursor
/// of the next opening.
const MOST_RUNS: usize = 1 << 16;

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

    /// Whether the file was made longer than it needs to be.
    pub(crate) fn is_ahead(&self) -> bool {
        self.length > self.end && self.length > self.scan_end
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
        if self.runs.len() < MOST_RUNS || self.runs.contains_key(&run.0) {
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
