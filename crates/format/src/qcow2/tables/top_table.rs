//! The two tables that are in memory as a whole: the active L1 table and the refcount table.

use std::collections::BTreeSet;

use crate::qcow2::layout::table_write::{TableWrite, dirty_parts};
use crate::qcow2::layout::words;

/// Words of a table, and which of them differ from the disk.
pub(crate) struct TopTable {
    words: Vec<u64>,
    dirty: BTreeSet<usize>,
}

impl TopTable {
    /// A table that is on disk.
    pub(crate) fn new(words: Vec<u64>) -> Self {
        Self { words, dirty: BTreeSet::new() }
    }

    pub(crate) fn words(&self) -> &[u64] {
        &self.words
    }

    pub(crate) fn len(&self) -> usize {
        self.words.len()
    }

    /// An entry; 0 past the end.
    pub(crate) fn get(&self, index: usize) -> u64 {
        self.words.get(index).copied().unwrap_or(0)
    }

    /// Changes an entry inside the table.
    pub(crate) fn set(&mut self, index: usize, word: u64) {
        self.words[index] = word;
        self.dirty.insert(index);
    }

    /// Makes the table longer, with zeros, or shorter. The caller has the location changed on disk.
    pub(crate) fn resize(&mut self, entries: usize) {
        self.words.resize(entries, 0);
        self.dirty.split_off(&entries);
    }

    pub(crate) fn has_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// The dirty entries, which a writeback takes.
    pub(crate) fn take_dirty(&mut self) -> BTreeSet<usize> {
        std::mem::take(&mut self.dirty)
    }

    /// The writeback that took these entries failed.
    pub(crate) fn redirty(&mut self, entries: BTreeSet<usize>) {
        self.dirty.extend(entries);
    }

    /// All of the table, at a new offset.
    pub(crate) fn whole(&self, offset: u64) -> TableWrite {
        TableWrite { offset, bytes: words::bytes_of(&self.words) }
    }

    /// The parts, of `step` bytes, that hold these entries, where the table is at `offset`.
    pub(crate) fn parts(&self, dirty: &BTreeSet<usize>, offset: u64, step: u64) -> Vec<TableWrite> {
        dirty_parts(&self.words, dirty, offset, step)
    }
}
