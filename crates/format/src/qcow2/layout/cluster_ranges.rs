//! Clusters that must have only one user, stored as ranges. Reason: a long table in consecutive
//! clusters takes no more memory than a short one.

use std::collections::BTreeMap;
use std::ops::Range;

/// Ranges of clusters that are taken.
#[derive(Default)]
pub(crate) struct ClusterRanges {
    /// The end of each range, by its start. Adjacent ranges are merged.
    ranges: BTreeMap<u64, u64>,
}

impl ClusterRanges {
    /// Whether any of these clusters is taken.
    pub(crate) fn overlaps(&self, clusters: &Range<u64>) -> bool {
        let before = self.ranges.range(..clusters.end).next_back();
        before.is_some_and(|(_, &end)| end > clusters.start && !clusters.is_empty())
    }

    /// The end of the last range; `None` if no cluster is taken.
    pub(crate) fn end(&self) -> Option<u64> {
        Some(*self.ranges.last_key_value()?.1)
    }

    /// Adds these clusters, whether any of them is taken or not.
    pub(crate) fn insert(&mut self, clusters: Range<u64>) {
        if clusters.is_empty() {
            return;
        }
        let (mut start, mut end) = (clusters.start, clusters.end);
        while let Some((&other, &other_end)) = self.ranges.range(..=end).next_back() {
            if other_end < start {
                break;
            }
            self.ranges.remove(&other);
            (start, end) = (start.min(other), end.max(other_end));
        }
        self.ranges.insert(start, end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_taken_and_found() {
        let mut ranges = ClusterRanges::default();
        assert_eq!(ranges.end(), None);
        ranges.insert(5..7);
        ranges.insert(10..12);
        for (range, taken) in
            [(0..5, false), (6..8, true), (7..10, false), (11..20, true), (5..5, false)]
        {
            assert_eq!(ranges.overlaps(&range), taken, "{range:?}");
        }
        ranges.insert(6..11);
        assert_eq!(ranges.ranges.iter().collect::<Vec<_>>(), [(&5, &12)]);
        assert_eq!(ranges.end(), Some(12));
        assert!(ranges.overlaps(&(8..9)));
    }
}
