//! The slices that a writeback writes: a copy, made at one moment, of everything that is dirty when
//! the writeback begins.
//!
//! A copy is consistent, because an L2 entry changes in memory only after the refcounts that it
//! depends on. Later changes wait for the next writeback. `writeback` decides the order of the
//! writes.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::qcow2::layout::header::{Header, LAZY_REFCOUNTS};
use crate::qcow2::layout::table_write::TableWrite;

use super::Tables;
use super::slice_cache::{DataStability, SliceCopy, SliceId, SliceKind};

/// The reason why metadata is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WritebackReason {
    /// A change without data, or with stable data.
    StableData,
    /// Data that was written without FUA, including all such writes in flight.
    PendingData,
    /// No metadata may remain dirty, because the cache is full or the tables are about to be
    /// changed as a whole.
    Full,
}

/// How much a writeback covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WritebackScope {
    /// All metadata.
    All,
    /// No refcounts: the image is marked as dirty instead.
    SkipRefcounts,
}

/// A new location of the refcount table.
#[derive(Clone, Copy)]
pub(crate) struct RefcountTableUpdate {
    offset: u64,
    clusters: u32,
}

/// A new size of the disk, or a new location of the L1 table.
#[derive(Clone, Copy)]
pub(crate) struct L1Update {
    size: u64,
    l1_offset: u64,
    l1_entries: u32,
}

impl RefcountTableUpdate {
    /// Applies the update to a header.
    pub(crate) fn apply(self, header: &mut Header) {
        header.refcount_table_offset = self.offset;
        header.refcount_table_clusters = self.clusters;
    }
}

impl L1Update {
    /// Applies the update to a header.
    pub(crate) fn apply(self, header: &mut Header) {
        header.size = self.size;
        header.l1_offset = self.l1_offset;
        header.l1_entries = self.l1_entries;
    }
}

/// A copy of the metadata that was dirty at one moment, grouped by the order of the writes.
pub(crate) struct WritebackBatch {
    scope: WritebackScope,
    /// The number of the last change that the batch contains.
    version: u64,
    /// Refcounts, and tables that nothing on disk refers to. They can be written in any order.
    unordered: Vec<TableWrite>,
    /// Entries of the refcount table, if the table stays at its offset.
    refcount_table: Vec<TableWrite>,
    refcount_table_update: Option<RefcountTableUpdate>,
    /// Slices of L2 tables, and entries of the L1 table if it stays at its offset.
    mappings: Vec<TableWrite>,
    l1_update: Option<L1Update>,
    /// Whether the header on disk may differ from the header that was written last.
    header_write_unknown: bool,
    /// Whether something on disk may refer to the new tables. The tables are durable before that.
    new_tables_linked: AtomicBool,
    /// Whether data that `mappings` (or `unordered`) refer to needs a flush.
    stability: DataStability,
    slices: Vec<SliceId>,
    new_tables: Vec<u64>,
    l1_dirty: BTreeSet<usize>,
    refcount_table_dirty: BTreeSet<usize>,
    /// The end of the redo log when the copy was made: all changes before this end are in the copy.
    redo_head: u64,
}

impl WritebackBatch {
    pub(crate) fn scope(&self) -> WritebackScope {
        self.scope
    }

    /// Refcounts, and tables that nothing on disk refers to. They can be written in any order.
    pub(crate) fn unordered(&self) -> &[TableWrite] {
        &self.unordered
    }

    /// Entries of the refcount table, if the table stays at its offset.
    pub(crate) fn refcount_table(&self) -> &[TableWrite] {
        &self.refcount_table
    }

    pub(crate) fn refcount_table_update(&self) -> Option<RefcountTableUpdate> {
        self.refcount_table_update
    }

    /// Slices of L2 tables, and entries of the L1 table if it stays at its offset.
    pub(crate) fn mappings(&self) -> &[TableWrite] {
        &self.mappings
    }

    pub(crate) fn l1_update(&self) -> Option<L1Update> {
        self.l1_update
    }

    /// Whether the header is written before the mappings.
    pub(crate) fn has_header_write(&self) -> bool {
        self.header_write_unknown || self.refcount_table_update.is_some()
    }

    /// Whether the batch changes neither the header nor the refcount table, and all data that the
    /// batch refers to is stable.
    pub(crate) fn is_stable_slices(&self) -> bool {
        self.stability == DataStability::Stable
            && self.refcount_table.is_empty()
            && !self.has_header_write()
            && self.l1_update.is_none()
    }

    /// Records that references to the new tables are about to be written. The tables are durable.
    pub(crate) fn note_new_tables_linked(&self) {
        self.new_tables_linked.store(true, Ordering::Relaxed);
    }

    fn is_empty(&self) -> bool {
        self.unordered.is_empty()
            && self.refcount_table.is_empty()
            && self.mappings.is_empty()
            && self.l1_update.is_none()
            && !self.has_header_write()
    }

    fn copy_refcounts(&mut self, tables: &mut Tables) {
        self.copy_slices(tables, SliceKind::Refcounts);
        self.refcount_table_dirty = tables.refcount_table.take_dirty();
        let (wanted, disk) = (tables.headers.wanted(), tables.headers.disk());
        let offset = wanted.refcount_table_offset;
        if offset != disk.refcount_table_offset {
            self.unordered.push(tables.refcount_table.whole(offset));
            let clusters = wanted.refcount_table_clusters;
            self.refcount_table_update = Some(RefcountTableUpdate { offset, clusters });
        } else {
            let dirty = &self.refcount_table_dirty;
            let step = tables.geometry.slice_size();
            self.refcount_table = tables.refcount_table.parts(dirty, offset, step);
        }
    }

    fn copy_mappings(&mut self, tables: &mut Tables) {
        self.copy_slices(tables, SliceKind::L2);
        let (wanted, disk) = (tables.headers.wanted(), tables.headers.disk());
        let is_moved = wanted.l1_offset != disk.l1_offset;
        if is_moved {
            self.unordered.push(tables.l1.whole(wanted.l1_offset));
        } else {
            let step = tables.geometry.slice_size();
            self.mappings.extend(tables.l1.parts(&self.l1_dirty, wanted.l1_offset, step));
        }
        if is_moved || wanted.size != disk.size {
            let (size, l1_offset, l1_entries) = (wanted.size, wanted.l1_offset, wanted.l1_entries);
            self.l1_update = Some(L1Update { size, l1_offset, l1_entries });
        }
    }

    /// Copies the dirty slices of tables that are on disk, and copies every new table as a whole.
    fn copy_slices(&mut self, tables: &mut Tables, kind: SliceKind) {
        let geometry = tables.geometry;
        for copy in tables.cache.begin_writeback(kind) {
            let SliceCopy { id, bytes, stability } = copy;
            self.slices.push(id);
            if stability == DataStability::Unstable {
                self.stability = stability;
            }
            let table = id.offset & !(geometry.cluster_size() - 1);
            if !tables.new_tables.contains_key(&table) {
                let write = TableWrite { offset: id.offset, bytes: bytes.into() };
                match kind {
                    SliceKind::Refcounts => self.unordered.push(write),
                    SliceKind::L2 => self.mappings.push(write),
                }
            }
        }
        let new = tables.new_tables.iter().filter(|&(_, &other)| other == kind);
        for (&offset, _) in new {
            let mut bytes = vec![0; geometry.cluster_size() as usize];
            for (start, part) in (offset..)
                .step_by(geometry.slice_size() as usize)
                .zip(bytes.chunks_exact_mut(geometry.slice_size() as usize))
            {
                if let Some(slice) = tables.cache.get(start) {
                    part.copy_from_slice(&slice.bytes);
                }
            }
            self.unordered.push(TableWrite { offset, bytes });
            self.new_tables.push(offset);
        }
    }
}

impl Tables {
    /// Copies all dirty metadata; `None` if nothing is dirty.
    pub(crate) fn begin_writeback(&mut self, reason: WritebackReason) -> Option<WritebackBatch> {
        let mut batch = WritebackBatch {
            scope: self.scope_for(reason),
            version: self.version,
            unordered: Vec::new(),
            refcount_table: Vec::new(),
            refcount_table_update: None,
            mappings: Vec::new(),
            l1_update: None,
            header_write_unknown: self.headers.is_write_unknown(),
            new_tables_linked: AtomicBool::new(false),
            stability: DataStability::Stable,
            slices: Vec::new(),
            new_tables: Vec::new(),
            l1_dirty: self.l1.take_dirty(),
            refcount_table_dirty: BTreeSet::new(),
            redo_head: self.redo.head(),
        };
        if batch.scope == WritebackScope::All {
            batch.copy_refcounts(self);
        }
        batch.copy_mappings(self);
        if batch.is_empty() {
            self.finish_writeback(batch);
            return None;
        }
        Some(batch)
    }

    fn scope_for(&self, reason: WritebackReason) -> WritebackScope {
        let (wanted, disk) = (self.headers.wanted(), self.headers.disk());
        let is_lazy = wanted.compatible & LAZY_REFCOUNTS != 0;
        // This writeback frees the old refcount table, so it must make the new refcount table
        // durable.
        let is_moving = wanted.refcount_table_offset != disk.refcount_table_offset;
        match reason {
            WritebackReason::StableData | WritebackReason::PendingData if is_lazy && !is_moving => {
                WritebackScope::SkipRefcounts
            }
            _ => WritebackScope::All,
        }
    }

    /// Records that the writeback is durable.
    pub(crate) fn finish_writeback(&mut self, batch: WritebackBatch) {
        for &slice in &batch.slices {
            self.cache.end_writeback(slice);
        }
        for table in batch.new_tables {
            self.new_tables.remove(&table);
        }
        self.durable_version = self.durable_version.max(batch.version);
        self.redo.trim(batch.redo_head);
    }

    /// Marks the batch as dirty again, because the writeback failed or was dropped.
    pub(crate) fn abort_writeback(&mut self, batch: WritebackBatch) {
        for &slice in &batch.slices {
            self.cache.redirty(slice);
        }
        if batch.new_tables_linked.load(Ordering::Relaxed) {
            for table in batch.new_tables {
                self.new_tables.remove(&table);
            }
        }
        self.l1.redirty(batch.l1_dirty);
        self.refcount_table.redirty(batch.refcount_table_dirty);
    }

    /// Whether anything in memory differs from the disk.
    pub(crate) fn has_dirty(&self) -> bool {
        self.cache.has_dirty()
            || !self.new_tables.is_empty()
            || self.l1.has_dirty()
            || self.refcount_table.has_dirty()
            || self.headers.wanted() != self.headers.disk()
            || self.headers.has_old_names()
    }
}
