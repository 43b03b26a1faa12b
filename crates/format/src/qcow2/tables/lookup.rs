//! Looks up L2 tables and L2 entries, and checks their offsets.

use blockhouse_core::Error;

use crate::qcow2::layout::entry::{self, Entry, Reference};

use super::slice_cache::SliceId;
use super::{Blocked, Step, Tables};

impl Tables {
    /// The L2 table that the L1 entry refers to.
    pub(crate) fn l2_table(&self, l1_index: usize) -> Result<Option<Reference>, Error> {
        entry::l1_reference(self.l1.get(l1_index), self.geometry).map_err(|error| {
            let what = format!("entry {l1_index} of the L1 table {error}");
            self.corrupt(what, self.header().l1_offset + l1_index as u64 * 8)
        })
    }

    /// Whether an L1 entry refers to an L2 table that may be changed in place.
    pub(crate) fn has_writable_l2_table(&self, l1_index: usize) -> bool {
        matches!(self.l2_table(l1_index), Ok(Some(table)) if table.is_copied())
    }

    /// The slice that holds the L2 entry of a guest cluster, if there is an L2 table.
    pub(crate) fn l2_slice(&self, cluster: u64) -> Result<Option<SliceId>, Error> {
        let at = self.geometry.l2_index(cluster);
        let table = self.l2_table(at.l1_index)?;
        if let Some(table) = table
            && self.geometry.cluster_of(table.offset) >= self.file.end()
        {
            return Err(self.corrupt(
                "an L2 table, or its L1 entry, lies past the end of the file",
                table.offset,
            ));
        }
        Ok(table.map(|table| SliceId::l2(table.offset + at.slice_offset)))
    }

    /// The slices of an L2 table.
    pub(crate) fn slices_of(&self, table: u64) -> impl Iterator<Item = SliceId> + Clone + use<> {
        let end = table + self.geometry.cluster_size();
        (table..end).step_by(self.geometry.slice_size() as usize).map(SliceId::l2)
    }

    /// The `index`-th entry of a slice of an L2 table.
    pub(crate) fn entry(&mut self, slice: SliceId, index: usize) -> Step<Entry> {
        let geometry = self.geometry;
        self.ensure(slice)?;
        let cached = self.cache.get(slice.offset).ok_or(Blocked::CacheMiss(slice))?;
        Entry::read(&cached.bytes, index, geometry).map_err(|error| {
            let offset = slice.offset + index as u64 * geometry.l2_entry_size();
            Blocked::Failed(self.corrupt(format!("an L2 entry {error}"), offset))
        })
    }

    /// Whether the entry of a guest cluster on disk may differ from the entry in memory. The slice
    /// of the entry must be cached.
    pub(crate) fn is_entry_dirty(&mut self, cluster: u64) -> bool {
        let index = self.geometry.l2_index(cluster).index;
        let Ok(Some(slice)) = self.l2_slice(cluster) else { return false };
        self.cache.get(slice.offset).is_some_and(|slice| slice.is_dirty(index))
    }

    /// Fails if the entry of a guest cluster refers to a cluster outside of the file, to a table,
    /// or to another offset than the guest's in a data file. Such a cluster must be neither
    /// overwritten nor freed.
    pub(crate) fn check_host(&self, cluster: u64, entry: Entry) -> Step<()> {
        let geometry = self.geometry;
        if geometry.has_data_file {
            return self.check_data_file_host(cluster, entry);
        }
        let (offset, clusters) = match entry {
            Entry::Standard { host: None, .. } => return Ok(()),
            Entry::Standard { host: Some(host), .. } => {
                let cluster = geometry.cluster_of(host.offset);
                (host.offset, cluster..cluster + 1)
            }
            Entry::Compressed(data) => (data.offset, data.host_clusters(geometry)),
        };
        let is_possible = |host: u64| host < self.file.bound() && !self.active.contains(&host);
        if clusters.clone().all(is_possible) {
            return Ok(());
        }
        let guest = geometry.offset_of(cluster);
        let what = format!("the L2 entry of guest offset {guest} has an invalid host offset");
        Err(self.corrupt(what, offset).into())
    }

    /// Fails unless the host offset in a data file is the guest's offset.
    pub(crate) fn check_data_file_host(&self, cluster: u64, entry: Entry) -> Step<()> {
        match entry {
            Entry::Standard { host: Some(host), .. }
                if self.geometry.has_data_file
                    && host.offset != self.geometry.offset_of(cluster) =>
            {
                let guest = self.geometry.offset_of(cluster);
                let what = format!("the data file cannot hold the guest's offset {guest} there");
                Err(self.corrupt(what, host.offset).into())
            }
            _ => Ok(()),
        }
    }

    /// Returns a cache miss (`Blocked`) if the slice is not cached. Creates slices of tables that
    /// are not on disk yet.
    pub(crate) fn ensure(&mut self, id: SliceId) -> Step<()> {
        if let Some(slice) = self.cache.look_up(id.offset) {
            if slice.kind == id.kind {
                return Ok(());
            }
            let what = "an L2 table and a refcount block share a cluster";
            return Err(self.corrupt(what, id.offset).into());
        }
        let table = id.offset & !(self.geometry.cluster_size() - 1);
        if self.geometry.cluster_of(id.offset) >= self.file.bound() {
            let what = "a table lies beyond the end of the file";
            return Err(self.corrupt(what, id.offset).into());
        }
        if !self.new_tables.contains_key(&table) {
            return Err(Blocked::CacheMiss(id));
        }
        self.cache.insert(id, vec![0; self.geometry.slice_size() as usize].into());
        Ok(())
    }

    /// All entries of an L2 table.
    pub(crate) fn entries_of(&mut self, table: Reference) -> Step<Vec<Entry>> {
        let geometry = self.geometry;
        // All slices are ensured first, because the step restarts for each missing slice.
        for slice in self.slices_of(table.offset) {
            self.ensure(slice)?;
        }
        let mut entries = Vec::with_capacity(geometry.l2_entries() as usize);
        for slice in self.slices_of(table.offset) {
            for index in 0..geometry.slice_l2_entries() as usize {
                entries.push(self.entry(slice, index)?);
            }
        }
        Ok(entries)
    }
}
