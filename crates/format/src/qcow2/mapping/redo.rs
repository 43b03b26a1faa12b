//! Replays the redo log of a dead process.

use std::ops::Range;

use crate::qcow2::allocator::{DeferredFree, Punch};
use crate::qcow2::layout::entry::{Entry, Reference};
use crate::qcow2::tables::{DataStability, RedoRecord, SliceId, Step};

use super::Mapper;

impl Mapper<'_> {
    /// Compares entries with `record` in the first slice of `clusters`. Returns the end of the
    /// compared clusters, and each cluster whose entry `record` would change, with its new entry.
    /// Changes nothing.
    pub(crate) fn differing_entries(
        &mut self,
        record: &RedoRecord,
        clusters: Range<u64>,
    ) -> Step<(u64, Vec<(u64, Entry)>)> {
        let geometry = self.tables.geometry();
        let at = geometry.l2_index(clusters.start);
        let end = clusters.start + geometry.slice_l2_entries() - at.index as u64;
        let end = end.min(clusters.end);
        let slice = self.tables.l2_slice(clusters.start)?;
        let mut differing = Vec::new();
        for cluster in clusters.start..end {
            let old = self.old_entry(slice, cluster)?;
            let new = record.change.entry(cluster - record.clusters.start, old, geometry);
            let new = self.with_found_refcount(new)?;
            if new != old {
                differing.push((cluster, new));
            }
        }
        Ok((end, differing))
    }

    /// Sets these entries, all in one slice. Their host clusters must hold the data and have
    /// refcounts. Returns the clusters that lost their references, for the caller to free.
    pub(crate) fn set_entries(&mut self, entries: &[(u64, Entry)]) -> Step<Vec<DeferredFree>> {
        let mut dropped = Vec::new();
        let Some(&(first, _)) = entries.first() else { return Ok(dropped) };
        self.tables.check_dirty_limit()?;
        let geometry = self.tables.geometry();
        let slice = self.writable_l2_slice(first)?;
        for &(cluster, new) in entries {
            self.tables.entry(slice, geometry.l2_index(cluster).index)?;
            self.tables.check_host(cluster, new)?;
        }
        for &(cluster, new) in entries {
            let index = geometry.l2_index(cluster).index;
            let old = self.tables.entry(slice, index)?;
            if let Some(old) = self.allocator.dropped_clusters(geometry, old, new, Punch::No) {
                old.join(&mut dropped);
            }
            self.tables.set_entry(slice, index, new, DataStability::Unstable);
        }
        self.tables.note_change();
        Ok(dropped)
    }

    /// Clears COPIED in `entry` if the host cluster's refcount exceeds one. Reason: the cluster was
    /// freed and used again, and the process was killed before the cluster's lower refcount was
    /// written. The refcount stays, because another table may refer to the cluster: at most a
    /// cluster leaks.
    fn with_found_refcount(&mut self, entry: Entry) -> Step<Entry> {
        let geometry = self.tables.geometry();
        match entry {
            Entry::Standard { host: Some(host), subclusters }
                if !geometry.has_data_file
                    && self.tables.refcounts().get(geometry.cluster_of(host.offset))? > 1 =>
            {
                let host = Reference { copied: false, ..host };
                Ok(Entry::Standard { host: Some(host), subclusters })
            }
            entry => Ok(entry),
        }
    }

    fn old_entry(&mut self, slice: Option<SliceId>, cluster: u64) -> Step<Entry> {
        match slice {
            Some(slice) => self.tables.entry(slice, self.tables.geometry().l2_index(cluster).index),
            None => Ok(Entry::UNALLOCATED),
        }
    }
}
