//! The two tables that are in memory as a whole: the active L1 table and the refcount table.

use std::collections::BTreeSet;

use crate::qcow2::layout::table_write::{TableWrite, dirty_parts};
use crate::qcow2::layout::words;

/// Words of a table, and the indexes of the words that differ from the disk.
pub(crate) struct TopTable {
    /// All words. A trimmed table omits the zeros at its end.
    words: Vec<u64>,
    length: usize,
    is_trimmed: bool,
    dirty: BTreeSet<usize>,
}

impl TopTable {
    /// A table that is on disk.
    pub(crate) fn new(words: Vec<u64>) -> Self {
        Self { length: words.len(), words, is_trimmed: false, dirty: BTreeSet::new() }
    }

    /// As [`new`](Self::new), without memory for the zeros at the table's end: a refcount table is
    /// a whole cluster, of which a small image uses one word.
    pub(crate) fn trimmed(words: Vec<u64>) -> Self {
        let used = words.iter().rposition(|&word| word != 0).map_or(0, |last| last + 1);
        Self { words: words[..used].to_vec(), is_trimmed: true, ..Self::new(words) }
    }

    /// The words, without the omitted zeros of a trimmed table.
    pub(crate) fn words(&self) -> &[u64] {
        &self.words
    }

    /// All words.
    pub(crate) fn to_vec(&self) -> Vec<u64> {
        let mut words = self.words.clone();
        words.resize(self.length, 0);
        words
    }

    /// The number of words, including the omitted zeros.
    pub(crate) fn len(&self) -> usize {
        self.length
    }

    /// An entry; 0 past the end.
    pub(crate) fn get(&self, index: usize) -> u64 {
        self.words.get(index).copied().unwrap_or(0)
    }

    /// Changes an entry. Past the end of the table, changes nothing and returns `false`.
    #[must_use]
    pub(crate) fn set(&mut self, index: usize, word: u64) -> bool {
        if index >= self.length {
            return false;
        }
        if index >= self.words.len() {
            self.words.resize(index + 1, 0);
        }
        self.words[index] = word;
        self.dirty.insert(index);
        true
    }

    /// Makes the table longer, with zeros, or shorter. To make the table longer, the caller also
    /// moves the table on disk.
    pub(crate) fn resize(&mut self, entries: usize) {
        if self.is_trimmed {
            self.words.truncate(entries)
        } else {
            self.words.resize(entries, 0)
        }
        self.length = entries;
        self.dirty.split_off(&entries);
    }

    pub(crate) fn has_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Takes the dirty entries, for a writeback.
    pub(crate) fn take_dirty(&mut self) -> BTreeSet<usize> {
        std::mem::take(&mut self.dirty)
    }

    /// Makes entries dirty again, because the writeback that took them failed.
    pub(crate) fn redirty(&mut self, entries: BTreeSet<usize>) {
        self.dirty.extend(entries);
    }

    /// The write of the whole table at a new offset.
    pub(crate) fn whole(&self, offset: u64) -> TableWrite {
        TableWrite { offset, bytes: words::bytes_of(&self.to_vec()) }
    }

    /// The writes of the parts, of `step` bytes, that contain these entries of a table at `offset`.
    pub(crate) fn parts(&self, dirty: &BTreeSet<usize>, offset: u64, step: u64) -> Vec<TableWrite> {
        if self.is_trimmed {
            dirty_parts(&self.to_vec(), dirty, offset, step)
        } else {
            dirty_parts(&self.words, dirty, offset, step)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trimmed_table_is_the_same_table() {
        let words: Vec<u64> =
            (0..1024).map(|index| u64::from(index % 7 == 3 && index < 100)).collect();
        let (mut whole, mut trimmed) = (TopTable::new(words.clone()), TopTable::trimmed(words));
        assert!(trimmed.words().len() < 100);
        for table in [&mut whole, &mut trimmed] {
            assert!(table.set(600, 5) && table.set(3, 0));
            assert!(!table.set(1024, 1), "it does not reach this far");
            assert_eq!((table.get(600), table.get(700), table.get(5000)), (5, 0, 0));
        }
        let parts = |table: &TopTable, dirty| {
            let parts = table.parts(dirty, 1 << 16, 512).into_iter();
            parts.map(|part| (part.offset, part.bytes)).collect::<Vec<_>>()
        };
        let dirty = whole.take_dirty();
        assert_eq!(trimmed.take_dirty(), dirty);
        assert_eq!(parts(&whole, &dirty), parts(&trimmed, &dirty));
        for table in [&mut whole, &mut trimmed] {
            table.resize(2048);
        }
        assert_eq!((trimmed.len(), trimmed.to_vec()), (2048, whole.words().to_vec()));
        assert_eq!(whole.whole(7).bytes, trimmed.whole(7).bytes);
        trimmed.resize(64);
        assert_eq!((trimmed.get(600), trimmed.to_vec().len()), (0, 64));
    }

    #[test]
    fn an_empty_table_takes_no_memory() {
        let table = TopTable::trimmed(vec![0; 8192]);
        assert_eq!((table.words().len(), table.len(), table.get(8191)), (0, 8192, 0));
    }
}
