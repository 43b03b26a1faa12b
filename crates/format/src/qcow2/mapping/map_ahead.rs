//! Maps the clusters ahead of a run of first writes (`runs_ahead`) to prepared space.
//!
//! Clusters are mapped ahead only in the step that allocates for the first write, so one writeback
//! writes the entries of both. The zeros in the host clusters are durable before any entry refers
//! to them. The entries change like all L2 entries: after the refcounts, marked as dirty, and
//! appended to the redo log. If the first write fails, the mappings stay, and their clusters read
//! as before.

use std::ops::Range;

use crate::qcow2::layout::entry::{Entry, Reference, SubclusterBitmap};
use crate::qcow2::tables::{DataStability, RedoChange, RedoRecord, SliceId, Step};

use super::Mapper;

impl Mapper<'_> {
    /// The number of clusters after `clusters` that may be mapped ahead. They must have entries in
    /// `slice`, as all of `clusters` have, read as zeros without a host cluster, and have no
    /// pending change.
    pub(super) fn clusters_ahead(&mut self, slice: SliceId, clusters: &Range<u64>) -> Step<u64> {
        if !self.allocator.has_prepared() {
            return Ok(0);
        }
        let geometry = self.tables.geometry();
        let header = self.tables.header();
        let wanted = self.mapping.runs.wanted(clusters.start, geometry.cluster_bits);
        // Zeros in the file do not decrypt to zeros, and only whole clusters are mapped ahead.
        if wanted == 0 || header.encryption.is_some() || geometry.extended_l2 {
            return Ok(0);
        }
        let reads_backing = self.has_backing();
        let in_slice = geometry.slice_l2_entries() - geometry.l2_index(clusters.start).index as u64;
        let end = (clusters.end + wanted).min(clusters.start + in_slice);
        let end = end.min(geometry.clusters_for(header.size));
        // `clusters` may lie past the size in the header: before a disk gets a larger size, the
        // backing file's bytes past the old end are overwritten.
        if end <= clusters.end {
            return Ok(0);
        }
        let Ok(end) = self.mapping.changes.unlocked_until(clusters.end, end) else { return Ok(0) };
        let mut found = clusters.end;
        while found < end {
            match self.tables.entry(slice, geometry.l2_index(found).index)? {
                Entry::Standard { host: None, subclusters }
                    if !reads_backing || subclusters == SubclusterBitmap::ZERO => {}
                _ => break,
            }
            found += 1;
        }
        // The clusters mapped ahead take one record in the log, besides those of the pending
        // changes.
        let pending = self.mapping.changes.len() + 1;
        let has_room = found > clusters.end && self.tables.redo.check_room(pending).is_ok();
        Ok(if has_room { found - clusters.end } else { 0 })
    }

    /// Maps the clusters that follow `clusters` to `hosts`: host clusters with durable, written
    /// zeros. As after a write, the entries are dirty and recorded in the redo log.
    pub(super) fn map_ahead(&mut self, slice: SliceId, clusters: Range<u64>, hosts: Range<u64>) {
        let geometry = self.tables.geometry();
        let ahead = clusters.end..clusters.end + (hosts.end - hosts.start);
        self.mapping.runs.note_first(clusters, hosts.end - hosts.start);
        let entry_of = |host: u64| Entry::Standard {
            host: Some(Reference::with_copied(geometry.offset_of(host))),
            subclusters: SubclusterBitmap::DATA,
        };
        for (cluster, host) in ahead.clone().zip(hosts.clone()) {
            let index = geometry.l2_index(cluster).index;
            self.tables.set_entry(slice, index, entry_of(host), DataStability::Stable);
        }
        if !ahead.is_empty() {
            let change = RedoChange::Set(entry_of(hosts.start));
            self.tables
                .redo
                .append(&RedoRecord { clusters: ahead, change }, self.tables.geometry());
            self.tables.note_change();
        }
    }
}
