//! The steps that add or remove entries when a disk grows or shrinks.

use crate::qcow2::allocator::{DeferredFree, Punch, Users};
use crate::qcow2::layout::entry::Entry;
use crate::qcow2::tables::{Blocked, DataStability, Step};

use super::Mapper;

impl Mapper<'_> {
    /// Grows the L1 table to cover a disk of `size` bytes.
    pub(crate) fn grow_l1(&mut self, size: u64) -> Step<()> {
        let geometry = self.tables.geometry();
        let entries = geometry.l1_entries_for(size);
        if entries <= self.tables.l1().len() as u64 {
            return Ok(());
        }
        let count = geometry.clusters_for(entries * 8);
        let new = self.allocator.allocate_row(self.tables, count)?;
        if let Some(old) = self.tables.move_l1(entries, new) {
            self.allocator.frees.defer(DeferredFree::of(old));
        }
        Ok(())
    }

    /// Maps the clusters from `cluster` on, up to the end of its slice and at most up to `end`, to
    /// their host offsets in the raw disk. Returns the next cluster.
    pub(crate) fn map_raw_slice(&mut self, cluster: u64, end: u64) -> Step<u64> {
        let geometry = self.tables.geometry();
        let first = geometry.l2_index(cluster).index as u64;
        let next = end.min(cluster + geometry.slice_l2_entries() - first);
        self.wait_for_changes(cluster, next)?;
        let slice = self.writable_l2_slice(cluster)?;
        for (index, cluster) in (first as usize..).zip(cluster..next) {
            let entry = Entry::data(geometry.offset_of(cluster));
            self.tables.set_entry(slice, index, entry, DataStability::Stable);
        }
        self.tables.note_change();
        Ok(next)
    }

    /// Empties the L2 entries from `cluster` to the end of its slice. Returns the next cluster.
    pub(crate) fn empty_slice(&mut self, cluster: u64) -> Step<u64> {
        let geometry = self.tables.geometry();
        let at = geometry.l2_index(cluster);
        let next = cluster + geometry.slice_l2_entries() - at.index as u64;
        self.wait_for_changes(cluster, next)?;
        if self.tables.l2_table(at.l1_index)?.is_none() {
            return Ok(next);
        }
        let slice = self.writable_l2_slice(cluster)?;
        let indexes = at.index..geometry.slice_l2_entries() as usize;
        let entries: Vec<Entry> =
            indexes.clone().map(|index| self.tables.entry(slice, index)).collect::<Step<_>>()?;
        // If the disk grows again, the backing file must not become visible here.
        let new = self.discarded_entry();
        for (index, old) in indexes.zip(entries).filter(|&(_, old)| old != Entry::UNALLOCATED) {
            self.defer_free_of(old, new, Punch::Yes);
            self.tables.set_entry(slice, index, new, DataStability::Stable);
        }
        self.tables.note_change();
        Ok(next)
    }

    /// Removes an L2 table from the L1 table, and defers freeing the L2 table and the clusters that
    /// it refers to.
    pub(crate) fn drop_l2_table(&mut self, l1_index: usize) -> Step<()> {
        let geometry = self.tables.geometry();
        let first = l1_index as u64 * geometry.l2_entries();
        self.wait_for_changes(first, first + geometry.l2_entries())?;
        let Some(table) = self.tables.l2_table(l1_index)? else { return Ok(()) };
        // Clusters that a snapshot also refers to are not punched.
        let punch = if table.is_copied() { Punch::Yes } else { Punch::No };
        for entry in self.tables.entries_of(table)? {
            self.defer_free_of(entry, Entry::UNALLOCATED, punch);
        }
        self.tables.remove_l2_table(l1_index);
        let cluster = geometry.cluster_of(table.offset);
        let users = if table.is_copied() { Users::None } else { Users::Others };
        self.allocator.frees.defer(DeferredFree { clusters: cluster..cluster + 1, punch, users });
        Ok(())
    }

    /// Shrinks the disk and its L1 table. Nothing on disk beyond `size` may be in use.
    pub(crate) fn cut(&mut self, size: u64) -> Step<()> {
        // At least one L1 entry is kept, because other programs may not expect an L1 table without
        // entries.
        let entries = self.tables.geometry().l1_entries_for(size).max(1);
        let unused = self.tables.truncate_l1(entries.min(self.tables.l1().len() as u64));
        if !unused.is_empty() {
            let free = DeferredFree { punch: Punch::Yes, ..DeferredFree::of(unused) };
            self.allocator.frees.defer(free);
        }
        self.tables.set_size(size);
        Ok(())
    }

    fn defer_free_of(&mut self, old: Entry, new: Entry, punch: Punch) {
        let geometry = self.tables.geometry();
        if let Some(free) = self.allocator.dropped_clusters(geometry, old, new, punch) {
            self.allocator.frees.defer(free);
        }
    }

    fn wait_for_changes(&mut self, first: u64, end: u64) -> Step<()> {
        self.tables.check_dirty_limit()?;
        let unlocked = self.mapping.changes.unlocked_until(first, end).map_err(Blocked::Wait)?;
        if unlocked < end {
            // Only a locked cluster has an event to wait for.
            for cluster in first..end {
                self.wait_for_change(cluster)?;
            }
        }
        self.wait_for_overwrites(&(first..end))
    }
}
