//! Ends pending changes: a link sets the entries in memory, an abort frees the allocated clusters.

use std::ops::Range;

use blockhouse_core::{ByteRange, Durability, Extent, ExtentFlags, ExtentState};

use crate::Abort;
use crate::qcow2::allocator::{DeferredFree, Punch};
use crate::qcow2::layout::entry::{
    Entry, Reference, SubclusterBitmap, SubclusterState, subclusters_in,
};
use crate::qcow2::layout::geometry::Geometry;
use crate::qcow2::tables::{DataStability, EntryRun, RedoChange, RedoRecord, SliceId, Step};

use super::Mapper;
use super::pending_changes::Change;

/// A pending change whose entries are being set.
struct EntryChange<'a> {
    /// The first cluster of the change.
    first: u64,
    change: &'a Change,
    /// The guest range that becomes visible.
    whole: ByteRange,
    stability: DataStability,
}

impl Mapper<'_> {
    /// Links an extent whose data is written: sets all its entries, or none if a step is blocked.
    /// Returns the clusters to which entries no longer refer, for the caller to free.
    pub(crate) fn link(&mut self, extent: Extent, data: Durability) -> Step<Vec<DeferredFree>> {
        let mut dropped = Vec::new();
        if !extent.flags.contains(ExtentFlags::NEW) {
            self.end_overwrite(extent);
            return Ok(dropped);
        }
        let geometry = self.tables.geometry();
        let first = geometry.cluster_of(extent.alloc_range.offset());
        let Some(pending) = self.mapping.changes.get(first) else { return Ok(dropped) };
        let (clusters, change) = (pending.clusters(), pending.change().clone());
        let stability = match data {
            Durability::None => DataStability::Unstable,
            Durability::Data | Durability::Full => DataStability::Stable,
        };
        let slice = self.writable_l2_slice(first)?;
        self.tables.redo.check_promised()?;
        for cluster in clusters.clone() {
            self.tables.entry(slice, geometry.l2_index(cluster).index)?;
        }
        let entry = EntryChange { first, change: &change, whole: extent.alloc_range, stability };
        for cluster in clusters.clone() {
            if let Some(old) = self.change_entry(slice, cluster, &entry)? {
                old.join(&mut dropped);
            }
        }
        self.append_redo(slice, clusters.clone(), &change)?;
        if let Change::Write { host, .. } = change
            && !geometry.has_data_file
        {
            let end = geometry.cluster_of(host) + (clusters.end - clusters.start);
            self.allocator.note_written(end);
        }
        self.tables.note_change();
        self.mapping.changes.end(first);
        Ok(dropped)
    }

    fn change_entry(
        &mut self,
        slice: SliceId,
        cluster: u64,
        entry: &EntryChange,
    ) -> Step<Option<DeferredFree>> {
        let geometry = self.tables.geometry();
        let index = geometry.l2_index(cluster).index;
        let old = self.tables.entry(slice, index)?;
        let new = match *entry.change {
            Change::Write { host, .. } => {
                let host = host + geometry.offset_of(cluster - entry.first);
                let host = Some(Reference::with_copied(host));
                let subclusters = written_subclusters(geometry, old, cluster, entry.whole);
                Entry::Standard { host, subclusters }
            }
            Change::Compressed(data) => Entry::Compressed(data),
            Change::Zero { keep: true } => old.zeroed_keeping_host(),
            Change::Zero { keep: false } => Entry::ZERO,
            Change::Discard => self.discarded_entry(),
            Change::ZeroSubclusters { mask, keep } => match old {
                Entry::Standard { host, subclusters } => {
                    let subclusters = subclusters.with(mask, SubclusterState::Zero);
                    let host = host.filter(|_| keep || subclusters.data != 0);
                    Entry::Standard { host, subclusters }
                }
                Entry::Compressed(_) => old,
            },
        };
        let punch = match entry.change {
            Change::Write { .. } | Change::Compressed(_) => Punch::No,
            Change::Zero { .. } | Change::Discard | Change::ZeroSubclusters { .. } => Punch::Yes,
        };
        let dropped = self.allocator.dropped_clusters(geometry, old, new, punch);
        self.tables.set_entry(slice, index, new, entry.stability);
        Ok(dropped)
    }

    /// Records the new entries of these clusters, all in one slice, in the redo log.
    fn append_redo(&mut self, slice: SliceId, clusters: Range<u64>, change: &Change) -> Step<()> {
        if !self.tables.redo.is_attached() {
            return Ok(());
        }
        if let Change::Zero { keep: true } = change {
            let change = RedoChange::ZeroKeepingHost;
            self.tables.redo.append(&RedoRecord { clusters, change }, self.tables.geometry());
            return Ok(());
        }
        let geometry = self.tables.geometry();
        let mut run = EntryRun::default();
        for cluster in clusters {
            let entry = self.tables.entry(slice, geometry.l2_index(cluster).index)?;
            if let Some(record) = run.push(cluster, entry, geometry) {
                self.tables.redo.append(&record, self.tables.geometry());
            }
        }
        if let Some(record) = run.finish() {
            self.tables.redo.append(&record, self.tables.geometry());
        }
        Ok(())
    }

    /// The entry of a discarded cluster. In version 3 the entry hides the data of a backing file,
    /// even of one that the image gets later; version 2 has no such entry.
    pub(super) fn discarded_entry(&self) -> Entry {
        if self.tables.geometry().version >= 3 { Entry::ZERO } else { Entry::UNALLOCATED }
    }

    /// Aborts the change of an extent whose data was not written.
    pub(crate) fn abort(&mut self, extent: Extent, why: Abort) {
        let geometry = self.tables.geometry();
        if why == Abort::InFlight
            && let ExtentState::Mapped { host } = extent.state
        {
            let hosts = ByteRange::between(host, host + extent.guest.length());
            self.quarantine(geometry.clusters_of(hosts));
        }
        if !extent.flags.contains(ExtentFlags::NEW) {
            self.end_overwrite(extent);
            return;
        }
        let first = geometry.cluster_of(extent.alloc_range.offset());
        let Some(pending) = self.mapping.changes.end(first) else { return };
        match *pending.change() {
            // Clusters that may still be written to are never freed.
            _ if why == Abort::InFlight => {}
            Change::Write { host, allocated: true } => {
                let start = geometry.cluster_of(host);
                let clusters = pending.clusters();
                let end = start + (clusters.end - clusters.start);
                self.allocator.free_unlinked(self.tables, start..end);
            }
            Change::Compressed(data) => {
                self.allocator.free_unlinked(self.tables, data.host_clusters(geometry));
            }
            Change::Write { allocated: false, .. }
            | Change::Zero { .. }
            | Change::Discard
            | Change::ZeroSubclusters { .. } => {}
        }
    }

    fn end_overwrite(&mut self, extent: Extent) {
        if matches!(extent.state, ExtentState::Mapped { .. }) {
            let clusters = self.tables.geometry().clusters_of(extent.guest);
            self.mapping.changes.end_overwrite(clusters);
        }
    }
}

/// The subclusters of a cluster after `whole` is written.
fn written_subclusters(
    geometry: Geometry,
    old: Entry,
    cluster: u64,
    whole: ByteRange,
) -> SubclusterBitmap {
    match old {
        Entry::Standard { subclusters, .. } if geometry.extended_l2 => {
            let mask = subclusters_in(geometry, cluster, whole);
            subclusters.with(mask, SubclusterState::Data)
        }
        _ => SubclusterBitmap::DATA,
    }
}
