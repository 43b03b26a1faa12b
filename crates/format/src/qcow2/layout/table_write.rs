//! Writes of tables: bytes, and their offset.

use std::collections::BTreeSet;

use super::words;

/// Bytes of a table, and their offset in the file.
pub(crate) struct TableWrite {
    pub(crate) offset: u64,
    pub(crate) bytes: Vec<u8>,
}

/// The writes, of `step` bytes each, that cover the dirty entries of a table of words at `offset`.
pub(crate) fn dirty_parts(
    table: &[u64],
    dirty: &BTreeSet<usize>,
    offset: u64,
    step: u64,
) -> Vec<TableWrite> {
    let count = step as usize / 8;
    let starts: BTreeSet<usize> = dirty.iter().map(|index| index / count * count).collect();
    let part = |start: usize| {
        let end = (start + count).min(table.len());
        let bytes = words::bytes_of(&table[start..end]);
        TableWrite { offset: offset + start as u64 * 8, bytes }
    };
    starts.into_iter().map(part).collect()
}
