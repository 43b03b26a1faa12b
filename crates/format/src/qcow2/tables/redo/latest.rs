//! The merged records of a redo log: the latest change of each guest cluster.
//!
//! Only these changes are replayed. Reason: a host cluster that an older record names may have been
//! freed since, and an interrupted replay may have allocated this cluster for a table.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::qcow2::layout::geometry::Geometry;

use super::record::{RedoChange, RedoRecord};

/// Changes of disjoint ranges of guest clusters.
pub(crate) struct LatestChanges {
    geometry: Geometry,
    /// Keyed by the first cluster of each range; the values are the range's end and its change.
    changes: BTreeMap<u64, (u64, RedoChange)>,
}

impl LatestChanges {
    /// The latest changes of `records`, which are in order, the oldest first.
    pub(crate) fn of(records: &[RedoRecord], geometry: Geometry) -> Self {
        let mut latest = Self { geometry, changes: BTreeMap::new() };
        for record in records {
            latest.add(record);
        }
        latest
    }

    /// All changes, in the order of the clusters.
    pub(crate) fn iter(&self) -> impl Iterator<Item = RedoRecord> {
        self.changes
            .iter()
            .map(|(&start, &(end, change))| RedoRecord { clusters: start..end, change })
    }

    fn add(&mut self, record: &RedoRecord) {
        let Range { start, end } = record.clusters;
        self.split(start);
        self.split(end);
        let older: Vec<_> = self
            .changes
            .range(start..end)
            .map(|(&start, &(end, change))| (start, end, change))
            .collect();
        for &(start, ..) in &older {
            self.changes.remove(&start);
        }
        match record.change {
            RedoChange::Set(_) => {
                self.changes.insert(start, (end, record.change));
            }
            RedoChange::ZeroKeepingHost => self.add_zeros(start..end, &older),
        }
    }

    /// Adds zeros that keep the host clusters. The host clusters are named by `older` or by the
    /// tables.
    fn add_zeros(&mut self, clusters: Range<u64>, older: &[(u64, u64, RedoChange)]) {
        let mut next = clusters.start;
        for &(start, end, change) in older {
            if next < start {
                self.changes.insert(next, (start, RedoChange::ZeroKeepingHost));
            }
            let change = match change {
                RedoChange::Set(entry) => RedoChange::Set(entry.zeroed_keeping_host()),
                RedoChange::ZeroKeepingHost => change,
            };
            self.changes.insert(start, (end, change));
            next = end;
        }
        if next < clusters.end {
            self.changes.insert(next, (clusters.end, RedoChange::ZeroKeepingHost));
        }
    }

    /// Splits the change that has `cluster` in its middle.
    fn split(&mut self, cluster: u64) {
        let before = self.changes.range(..cluster).next_back();
        if let Some((&start, &(end, change))) = before
            && cluster < end
        {
            self.changes.insert(start, (cluster, change));
            let rest = change.skip(cluster - start, self.geometry);
            self.changes.insert(cluster, (end, rest));
        }
    }
}
