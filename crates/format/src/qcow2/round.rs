//! What a round writes: everything that was changed in memory when it began, copied at one moment.
//!
//! Since an entry of an L2 table is changed only after the refcounts it relies on, a copy of both at
//! one moment fits together; changes that come later wait for the next round. In which order the
//! parts go down is told in `writing`.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use super::deferred_free::DeferredFree;
use super::header::{Header, LAZY_REFCOUNTS};
use super::slice_cache::{DataStability, SliceCopy, SliceId, SliceKind};
use super::state::State;
use super::table_io;

/// What a round is run for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Occasion {
    /// A change whose data is stable, or that has none.
    Alone,
    /// Data that was written plainly, and all of that kind that is in flight.
    Shared,
    /// That nothing is left: to make room in the cache, or before the tables are changed as a whole.
    Relief,
}

/// How much a round writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// All.
    Everything,
    /// No refcounts: the image is marked as dirty instead.
    WithoutRefcounts,
}

/// Bytes and where they go.
pub(crate) struct Piece {
    pub(crate) offset: u64,
    pub(crate) bytes: Vec<u8>,
}

/// Where the refcount table is.
#[derive(Clone, Copy)]
pub(crate) struct TablePlace {
    offset: u64,
    clusters: u32,
}

/// How large the disk is, and where its L1 table.
#[derive(Clone, Copy)]
pub(crate) struct Resized {
    size: u64,
    l1_offset: u64,
    l1_entries: u32,
}

impl TablePlace {
    /// Changes a header accordingly.
    pub(crate) fn apply(self, header: &mut Header) {
        header.refcount_table_offset = self.offset;
        header.refcount_table_clusters = self.clusters;
    }
}

impl Resized {
    /// Changes a header accordingly.
    pub(crate) fn apply(self, header: &mut Header) {
        header.size = self.size;
        header.l1_offset = self.l1_offset;
        header.l1_entries = self.l1_entries;
    }
}

/// The content of a round.
pub(crate) struct Round {
    /// What is durable when it has ended well.
    pub(crate) version: u64,
    pub(crate) extent: Extent,
    /// Refcounts, and tables that nothing on disk refers to: they may be written at any time.
    pub(crate) free: Vec<Piece>,
    /// Entries of the refcount table, where it stays at its place.
    pub(crate) refcount_table: Vec<Piece>,
    /// Whether the refcount table has a new place.
    pub(crate) moved_refcount_table: Option<TablePlace>,
    /// Slices of L2 tables and entries of the L1 table, where it stays at its place.
    pub(crate) mappings: Vec<Piece>,
    /// A new size and place of the L1 table.
    pub(crate) resized: Option<Resized>,
    /// Whether the header on disk may be another one than `disk_header`.
    pub(crate) header_is_unsure: bool,
    /// Whether what refers to new tables may be on disk: those are durable then.
    pub(crate) exposed: AtomicBool,
    /// Whether data behind `mappings` (or `free`) needs a flush.
    pub(crate) stability: DataStability,
    slices: Vec<SliceId>,
    new_tables: Vec<u64>,
    l1_changed: BTreeSet<usize>,
    refcount_table_changed: BTreeSet<usize>,
    frees: Vec<DeferredFree>,
}

impl State {
    /// Takes what has to be written; `None` when that is nothing.
    pub(crate) fn begin_round(&mut self, occasion: Occasion) -> Option<Round> {
        let extent = self.extent_for(occasion);
        let mut round = Round {
            version: self.version,
            extent,
            free: Vec::new(),
            refcount_table: Vec::new(),
            moved_refcount_table: None,
            mappings: Vec::new(),
            resized: None,
            header_is_unsure: self.header_writes.is_unsure(),
            exposed: AtomicBool::new(false),
            stability: DataStability::Stable,
            slices: Vec::new(),
            new_tables: Vec::new(),
            l1_changed: std::mem::take(&mut self.l1_changed),
            refcount_table_changed: BTreeSet::new(),
            frees: self.frees.begin_writeback(),
        };
        if extent == Extent::Everything {
            self.take_refcounts(&mut round);
        }
        self.take_mappings(&mut round);
        let is_empty = round.free.is_empty()
            && round.refcount_table.is_empty()
            && round.moved_refcount_table.is_none()
            && round.mappings.is_empty()
            && round.resized.is_none()
            && !round.header_is_unsure;
        if is_empty {
            self.end_round(round);
            return None;
        }
        Some(round)
    }

    fn extent_for(&self, occasion: Occasion) -> Extent {
        let is_lazy = self.header.compatible & LAZY_REFCOUNTS != 0;
        // The old refcount table is given up with this round: the new one must be durable then.
        let is_moving = self.header.refcount_table_offset != self.disk_header.refcount_table_offset;
        match occasion {
            Occasion::Alone | Occasion::Shared if is_lazy && !is_moving => Extent::WithoutRefcounts,
            Occasion::Alone | Occasion::Shared | Occasion::Relief => Extent::Everything,
        }
    }

    fn take_refcounts(&mut self, round: &mut Round) {
        let geometry = self.geometry;
        self.take_slices(SliceKind::Refcounts, round);
        round.refcount_table_changed = std::mem::take(&mut self.refcount_table_changed);
        if self.header.refcount_table_offset != self.disk_header.refcount_table_offset {
            let offset = self.header.refcount_table_offset;
            round.free.push(Piece { offset, bytes: table_io::bytes_of(&self.refcount_table) });
            let clusters = self.header.refcount_table_clusters;
            round.moved_refcount_table = Some(TablePlace { offset, clusters });
            return;
        }
        let at = self.header.refcount_table_offset;
        round.refcount_table =
            entries(&self.refcount_table, &round.refcount_table_changed, at, geometry.slice_size());
    }

    fn take_mappings(&mut self, round: &mut Round) {
        self.take_slices(SliceKind::L2, round);
        let (wanted, disk) = (&self.header, &self.disk_header);
        let is_moved = wanted.l1_offset != disk.l1_offset;
        if is_moved {
            let offset = wanted.l1_offset;
            round.free.push(Piece { offset, bytes: table_io::bytes_of(&self.l1) });
        } else {
            let step = self.geometry.slice_size();
            round.mappings.extend(entries(&self.l1, &round.l1_changed, wanted.l1_offset, step));
        }
        if is_moved || wanted.size != disk.size {
            let (size, l1_offset, l1_entries) = (wanted.size, wanted.l1_offset, wanted.l1_entries);
            round.resized = Some(Resized { size, l1_offset, l1_entries });
        }
    }

    /// Takes changed slices: those of new tables with all of their table, the others alone.
    fn take_slices(&mut self, kind: SliceKind, round: &mut Round) {
        let geometry = self.geometry;
        for copy in self.cache.begin_writing(kind) {
            let SliceCopy { id, bytes, stability } = copy;
            round.slices.push(id);
            if stability == DataStability::Unstable {
                round.stability = stability;
            }
            let table = id.offset & !(geometry.cluster_size() - 1);
            if !self.new_tables.contains_key(&table) {
                let piece = Piece { offset: id.offset, bytes: bytes.into() };
                match kind {
                    SliceKind::Refcounts => round.free.push(piece),
                    SliceKind::L2 => round.mappings.push(piece),
                }
            }
        }
        let tables = self.new_tables.iter().filter(|&(_, &other)| other == kind);
        for (&offset, _) in tables {
            let mut bytes = vec![0; geometry.cluster_size() as usize];
            for (start, part) in (offset..)
                .step_by(geometry.slice_size() as usize)
                .zip(bytes.chunks_exact_mut(geometry.slice_size() as usize))
            {
                if let Some(slice) = self.cache.get(start) {
                    part.copy_from_slice(&slice.bytes);
                }
            }
            round.free.push(Piece { offset, bytes });
            round.new_tables.push(offset);
        }
    }

    /// The round is durable.
    pub(crate) fn end_round(&mut self, round: Round) {
        for &slice in &round.slices {
            self.cache.written(slice);
        }
        for table in round.new_tables {
            self.new_tables.remove(&table);
        }
        self.durable_version = self.durable_version.max(round.version);
        self.frees.finish_writeback(round.frees);
    }

    /// The round came to no good end: all of it has still to be written.
    pub(crate) fn undo_round(&mut self, round: Round) {
        for &slice in &round.slices {
            self.cache.not_written(slice);
        }
        if round.exposed.load(Ordering::Relaxed) {
            for table in round.new_tables {
                self.new_tables.remove(&table);
            }
        }
        self.l1_changed.extend(round.l1_changed);
        self.refcount_table_changed.extend(round.refcount_table_changed);
        self.frees.abort_writeback(round.frees);
    }

    /// Whether anything in memory differs from the disk.
    pub(crate) fn has_changes(&self) -> bool {
        self.cache.has_changes()
            || !self.new_tables.is_empty()
            || !self.l1_changed.is_empty()
            || !self.refcount_table_changed.is_empty()
            || !self.frees.is_empty()
            || self.header != self.disk_header
    }
}

/// The pieces of `step` bytes of a table of words at `offset` that hold changed entries.
pub(crate) fn entries(
    table: &[u64],
    changed: &BTreeSet<usize>,
    offset: u64,
    step: u64,
) -> Vec<Piece> {
    let words = step as usize / 8;
    let starts: BTreeSet<usize> = changed.iter().map(|index| index / words * words).collect();
    let piece = |start: usize| {
        let end = (start + words).min(table.len());
        let bytes = table_io::bytes_of(&table[start..end]);
        Piece { offset: offset + start as u64 * 8, bytes }
    };
    starts.into_iter().map(piece).collect()
}
