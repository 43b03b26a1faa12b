//! Which slices changed while all tables are copied beside the active ones.
//!
//! 1. A watch begins. From then on every slice that a step changes is noted, before a writeback can
//!    bring the change to the disk. So a reader of a slice without the lock finds it noted if that
//!    read saw a part of a change.
//! 2. Looking at a slice takes its note back and gives its bytes, at one moment.
//! 3. The watch ends by itself where tables are moved, dropped or replaced: nothing that was copied
//!    is to be used then. Tables that are added are not noted: the L1 table and the refcount table
//!    tell of them.

use std::collections::BTreeSet;

use super::Tables;
use super::slice_cache::SliceKind;

/// Offsets of slices that changed since they were looked at.
#[derive(Default)]
pub(super) struct ChangedSlices {
    l2: BTreeSet<u64>,
    refcounts: BTreeSet<u64>,
}

impl ChangedSlices {
    fn of(&self, kind: SliceKind) -> &BTreeSet<u64> {
        match kind {
            SliceKind::L2 => &self.l2,
            SliceKind::Refcounts => &self.refcounts,
        }
    }

    fn of_mut(&mut self, kind: SliceKind) -> &mut BTreeSet<u64> {
        match kind {
            SliceKind::L2 => &mut self.l2,
            SliceKind::Refcounts => &mut self.refcounts,
        }
    }
}

impl Tables {
    /// Begins a watch, without any change.
    pub(crate) fn begin_watch(&mut self) {
        self.watch = Some(ChangedSlices::default());
    }

    /// Ends the watch, if there is one.
    pub(crate) fn end_watch(&mut self) {
        self.watch = None;
    }

    /// Whether all changes since the watch began were noted.
    pub(crate) fn is_watched(&self) -> bool {
        self.watch.is_some()
    }

    /// The slices that changed and were not looked at since, in order.
    pub(crate) fn changed_slices(&self, kind: SliceKind) -> Vec<u64> {
        self.watch.iter().flat_map(|watch| watch.of(kind)).copied().collect()
    }

    /// How many these are, of all kinds.
    pub(crate) fn count_changed_slices(&self) -> usize {
        self.watch.as_ref().map_or(0, |watch| watch.l2.len() + watch.refcounts.len())
    }

    /// A slice was changed.
    pub(super) fn note_slice(&mut self, offset: u64, kind: SliceKind) {
        if let Some(watch) = &mut self.watch {
            watch.of_mut(kind).insert(offset);
        }
    }

    /// Takes the note of a slice back; its bytes, where they may differ from those on disk.
    pub(crate) fn look_at(&mut self, offset: u64, kind: SliceKind) -> Option<&[u8]> {
        if let Some(watch) = &mut self.watch {
            watch.of_mut(kind).remove(&offset);
        }
        self.peek(offset)
    }

    /// The bytes of a slice, where they may differ from those on disk.
    pub(crate) fn peek(&self, offset: u64) -> Option<&[u8]> {
        self.cache.peek(offset)
    }

    /// Whether nothing on disk refers to this table: slices of it that are not in memory are zeros.
    pub(crate) fn is_new_table(&self, offset: u64) -> bool {
        self.new_tables.contains_key(&offset)
    }
}
