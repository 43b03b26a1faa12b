//! Changes entries and tables in memory. A change is dirty until a writeback is durable.

use std::ops::Range;

use blockhouse_core::Error;

use crate::qcow2::layout::entry::{Entry, Reference, l1_word};

use super::slice_cache::{DataStability, SliceId, SliceKind};
use super::{Blocked, Step, Tables};

impl Tables {
    /// Counts a change that a flush must make durable.
    pub(crate) fn note_change(&mut self) {
        self.version += 1;
    }

    /// Changes the `index`-th entry of a cached slice of an L2 table.
    pub(crate) fn set_entry(
        &mut self,
        slice: SliceId,
        index: usize,
        entry: Entry,
        stability: DataStability,
    ) {
        self.watch.note(slice.offset, SliceKind::L2);
        let bytes = self.cache.change(slice.offset, index, stability);
        entry.write(bytes, index, self.geometry);
    }

    /// Creates an L2 table in `cluster` with the content of `old`, and makes an L1 entry refer to
    /// it.
    pub(crate) fn add_l2_table(
        &mut self,
        l1_index: usize,
        cluster: u64,
        old: Option<&[Box<[u8]>]>,
    ) -> Step<u64> {
        let table = self.geometry.offset_of(cluster);
        self.init_table(table, SliceKind::L2);
        for (id, bytes) in self.slices_of(table).zip(old.unwrap_or_default()) {
            self.ensure(id)?;
            self.cache.change(id.offset, 0, DataStability::Stable).copy_from_slice(bytes);
        }
        if !self.l1.set(l1_index, l1_word(Reference::with_copied(table))) {
            return Err(self.past_table("L1 table", self.header().l1_offset).into());
        }
        self.version += 1;
        Ok(table)
    }

    /// The content of an L2 table, slice by slice.
    pub(crate) fn content_of(&mut self, table: Reference) -> Step<Vec<Box<[u8]>>> {
        let mut content = Vec::new();
        for slice in self.slices_of(table.offset) {
            self.ensure(slice)?;
            let cached = self.cache.get(slice.offset).ok_or(Blocked::CacheMiss(slice))?;
            content.push(cached.bytes.clone());
        }
        Ok(content)
    }

    /// Removes an L2 table from the L1 table.
    pub(crate) fn remove_l2_table(&mut self, l1_index: usize) {
        self.watch.end();
        // An index past the end of the L1 table has no entry.
        let _ = self.l1.set(l1_index, 0);
        self.version += 1;
    }

    /// Gives the L1 table this many entries, and moves the table to these clusters, to which
    /// nothing on disk refers yet. Returns the table's old clusters.
    pub(crate) fn move_l1(&mut self, entries: u64, clusters: Range<u64>) -> Option<Range<u64>> {
        self.watch.end();
        let geometry = self.geometry;
        let old = geometry.cluster_of(self.header().l1_offset);
        let old_count = geometry.clusters_for(self.l1.len() as u64 * 8);
        self.active.extend(clusters.clone());
        self.l1.resize(entries as usize);
        let header = self.headers.wanted_mut();
        header.l1_offset = geometry.offset_of(clusters.start);
        header.l1_entries = entries as u32;
        self.version += 1;
        (old_count > 0).then(|| old..old + old_count)
    }

    /// Truncates the L1 table to this many entries. Its offset stays. Returns the clusters that the
    /// table no longer needs.
    pub(crate) fn truncate_l1(&mut self, entries: u64) -> Range<u64> {
        self.watch.end();
        let geometry = self.geometry;
        let start = geometry.cluster_of(self.header().l1_offset);
        let [kept, old] =
            [entries, self.l1.len() as u64].map(|count| start + geometry.clusters_for(count * 8));
        self.l1.resize(entries as usize);
        self.headers.wanted_mut().l1_entries = entries as u32;
        kept..old
    }

    /// Sets the size of the guest's disk, in bytes.
    pub(crate) fn set_size(&mut self, size: u64) {
        self.watch.end();
        self.headers.wanted_mut().size = size;
        self.version += 1;
    }

    /// Makes lookups use a snapshot's L1 table, in an image that is open for reading.
    pub(crate) fn show_l1(&mut self, l1: Vec<u64>) {
        self.l1 = super::TopTable::new(l1);
    }

    pub(super) fn past_table(&self, table: &str, offset: u64) -> Error {
        self.corrupt(format!("the {table} does not reach as far as the image"), offset)
    }

    /// Makes a cluster a table of zeros in memory, and drops the cached slices of the cluster.
    pub(super) fn init_table(&mut self, offset: u64, kind: SliceKind) {
        let geometry = self.geometry;
        let end = offset + geometry.cluster_size();
        self.cache.invalidate(offset, end, geometry.slice_size());
        self.new_tables.insert(offset, kind);
        self.active.insert(geometry.cluster_of(offset));
    }

    /// Fails for a cluster that holds a table: the table would be overwritten.
    pub(crate) fn check_not_active(&self, cluster: u64) -> Result<(), Error> {
        if !self.active.contains(&cluster) {
            return Ok(());
        }
        let what = "refcount 0 for a cluster that holds metadata";
        Err(self.corrupt(what, self.geometry.offset_of(cluster)))
    }
}
