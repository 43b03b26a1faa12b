//! Records the slices that change while all tables are copied beside the active ones.
//!
//! 1. A watch begins. From then on, every slice that a step changes is noted before a writeback can
//!    write the change to the disk. A read of a slice without the lock may see a part of a change.
//!    After such a read, the reader finds the slice noted.
//! 2. Reading a noted slice atomically returns its bytes and removes its note.
//! 3. The watch ends by itself if the L1 table is moved, tables are dropped or replaced, or the
//!    disk's size is set: the copies are then invalid. Added tables are not noted: the L1 table and
//!    the refcount table refer to them.

use std::collections::BTreeSet;

use super::Tables;
use super::slice_cache::SliceKind;

/// The slices that change while the watch is active.
#[derive(Default)]
pub(crate) struct ChangeWatch {
    changed: Option<ChangedSlices>,
}

/// Offsets of slices that changed since they were last read ([`Tables::look_at`]).
#[derive(Default)]
struct ChangedSlices {
    l2: BTreeSet<u64>,
    refcounts: BTreeSet<u64>,
}

impl ChangedSlices {
    fn of(&mut self, kind: SliceKind) -> &mut BTreeSet<u64> {
        match kind {
            SliceKind::L2 => &mut self.l2,
            SliceKind::Refcounts => &mut self.refcounts,
        }
    }
}

impl ChangeWatch {
    /// Begins the watch, without any noted slice.
    pub(crate) fn begin(&mut self) {
        self.changed = Some(ChangedSlices::default());
    }

    /// Ends the watch, if it is active.
    pub(crate) fn end(&mut self) {
        self.changed = None;
    }

    /// Whether the watch is active: all changes since its begin were noted.
    pub(crate) fn is_active(&self) -> bool {
        self.changed.is_some()
    }

    /// The offsets of the noted slices of a kind, in order.
    pub(crate) fn changed(&mut self, kind: SliceKind) -> Vec<u64> {
        self.changed.iter_mut().flat_map(|changed| changed.of(kind).iter()).copied().collect()
    }

    /// The number of noted slices of all kinds.
    pub(crate) fn count(&self) -> usize {
        self.changed.as_ref().map_or(0, |changed| changed.l2.len() + changed.refcounts.len())
    }

    /// Notes a changed slice.
    pub(super) fn note(&mut self, offset: u64, kind: SliceKind) {
        if let Some(changed) = &mut self.changed {
            changed.of(kind).insert(offset);
        }
    }
}

impl Tables {
    /// Removes the note of a slice. Returns the slice's bytes if the slice is cached: these bytes
    /// may differ from the bytes on disk.
    pub(crate) fn look_at(&mut self, offset: u64, kind: SliceKind) -> Option<&[u8]> {
        if let Some(changed) = &mut self.watch.changed {
            changed.of(kind).remove(&offset);
        }
        self.cache.peek(offset)
    }

    /// Whether nothing on disk refers to this table. Its slices that are not in memory are zeros.
    pub(crate) fn is_new_table(&self, offset: u64) -> bool {
        self.new_tables.contains_key(&offset)
    }
}
