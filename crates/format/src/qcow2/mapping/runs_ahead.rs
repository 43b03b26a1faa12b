//! Runs of first writes, and how many clusters are mapped ahead of them.
//!
//! The first write to a cluster changes a refcount and an L2 entry: two metadata writes besides the
//! data. If the first write uses prepared space (`allocator/prepared`), the same step can map the
//! guest's next clusters to more of this space (`map_ahead`). These clusters read as zeros before
//! and after, the same two metadata writes serve all of them, and each later write to one of them
//! is an overwrite in place.
//!
//! Mapping ahead is useful only for a run: each of its first writes begins at the end of the
//! clusters that the previous first write has mapped, ahead or for itself. As many clusters are
//! mapped ahead as the run has written, so the number doubles with each first write. No clusters
//! are mapped ahead if fewer than half of the clusters that were mapped ahead last were written. So
//! a run leaves at most as many unwritten clusters as it has written, and random writes leave
//! almost none.

use std::ops::Range;

/// The maximum that is mapped ahead at a time, in clusters (bits of [`Run::used`]) and in bytes.
const MAX_CLUSTERS: u64 = 64;
const MAX_BYTES: u64 = 4 << 20;

/// Maximum number of parallel runs: a file system's journal and several files.
const MAX_RUNS: usize = 4;

/// The latest runs, in order: the latest run is the last.
#[derive(Default)]
pub(super) struct RunsAhead {
    runs: Vec<Run>,
}

struct Run {
    /// The cluster after the last cluster that the run has mapped.
    end: u64,
    /// Number of clusters before `end` that were mapped ahead with the latest first write.
    ahead: u64,
    /// Bits of the clusters mapped ahead, set if a cluster was written since. The lowest bit is the
    /// last cluster.
    used: u64,
    /// Number of clusters that the run has written, without the clusters in `used`.
    written: u64,
}

impl Run {
    fn has_used_half(&self) -> bool {
        2 * u64::from(self.used.count_ones()) >= self.ahead
    }

    fn all_written(&self) -> u64 {
        self.written + u64::from(self.used.count_ones())
    }
}

impl RunsAhead {
    /// Number of clusters to map ahead with a first write that begins at cluster `first`.
    pub(super) fn wanted(&self, first: u64, cluster_bits: u32) -> u64 {
        let limit = MAX_CLUSTERS.min(MAX_BYTES >> cluster_bits);
        let run = self.runs.iter().find(|run| run.end == first && run.has_used_half());
        run.map_or(0, |run| (run.all_written() + 1).min(limit))
    }

    /// Records a first write that is about to write `clusters`, with `ahead` clusters mapped ahead
    /// after them.
    pub(super) fn note_first(&mut self, clusters: Range<u64>, ahead: u64) {
        let before = self.runs.iter().position(|run| run.end == clusters.start);
        let before = before.map(|index| self.runs.remove(index));
        let written = before.filter(Run::has_used_half).map_or(0, |run| run.all_written());
        if self.runs.len() == MAX_RUNS {
            // Single writes are evicted first, so that many of them do not evict a run.
            let single = self.runs.iter().position(|run| run.ahead == 0);
            self.runs.remove(single.unwrap_or(0));
        }
        let written = written + (clusters.end - clusters.start);
        self.runs.push(Run { end: clusters.end + ahead, ahead, used: 0, written });
    }

    /// Records that these clusters are about to be written in place.
    pub(super) fn note_overwrite(&mut self, clusters: &Range<u64>) {
        for run in &mut self.runs {
            let start = clusters.start.max(run.end - run.ahead);
            for cluster in start..clusters.end.min(run.end) {
                run.used |= 1 << (run.end - 1 - cluster);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes clusters one by one. Returns those whose write was a first write.
    fn write(runs: &mut RunsAhead, clusters: impl IntoIterator<Item = u64>) -> Vec<u64> {
        let (mut mapped, mut firsts) = (Vec::new(), Vec::new());
        for cluster in clusters {
            if mapped.contains(&cluster) {
                runs.note_overwrite(&(cluster..cluster + 1));
                continue;
            }
            firsts.push(cluster);
            let ahead = runs.wanted(cluster, 16);
            mapped.extend(cluster..=cluster + ahead);
            runs.note_first(cluster..cluster + 1, ahead);
        }
        firsts
    }

    #[test]
    fn what_is_mapped_ahead_doubles_up_to_a_limit() {
        let mut runs = RunsAhead::default();
        assert_eq!(write(&mut runs, 0..300), [0, 1, 4, 10, 22, 46, 94, 159, 224, 289]);
        assert_eq!(runs.wanted(354, 16), 0, "too little of the latest was written");
        assert_eq!(write(&mut runs, [1000]), [1000]);
        assert_eq!(runs.wanted(1001, 16), 2);
        assert_eq!(
            (runs.wanted(1001, 21), runs.wanted(1001, 23)),
            (2, 0),
            "of large clusters fewer"
        );
    }

    #[test]
    fn what_is_not_written_ends_a_run() {
        let mut runs = RunsAhead::default();
        write(&mut runs, 0..23);
        runs.note_overwrite(&(23..34));
        assert_eq!(runs.wanted(46, 16), 0, "11 of 23");
        runs.note_overwrite(&(20..24));
        assert_eq!(runs.wanted(46, 16), 0, "the same again");
        runs.note_overwrite(&(45..60));
        assert_eq!(runs.wanted(46, 16), 36);
        assert_eq!((runs.wanted(45, 16), runs.wanted(47, 16)), (0, 0));
    }

    #[test]
    fn scattered_and_backward_writes_map_nothing_ahead() {
        let mut runs = RunsAhead::default();
        let scattered = (0..200).map(|index| index * 7 % 401);
        assert_eq!(write(&mut runs, scattered).len(), 200);
        assert_eq!(write(&mut runs, (1000..1100).rev()).len(), 100);
        assert_eq!(write(&mut runs, (2000..2100).step_by(2)).len(), 50);
    }

    #[test]
    fn runs_go_on_side_by_side() {
        let mut runs = RunsAhead::default();
        let both = (0..100).flat_map(|index| [index, 1000 + index]);
        assert_eq!(write(&mut runs, both).len(), 2 * 7);
        let mut runs = RunsAhead::default();
        let among_others = (0..100).flat_map(|index| [index, 1000 + 3 * index]);
        assert_eq!(write(&mut runs, among_others).len(), 7 + 100);
    }
}
