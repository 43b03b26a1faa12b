//! Whole tables, read once from the storage in large pieces: for checks, which look at every entry.
//!
//! Guarantees: memory for two pieces of [`PIECE`] bytes, however long a table is; the cache of
//! single pages is not used. Other tasks of the thread run in between ([`WorkBudget`]).

use std::ops::Range;

use blockhouse_core::{Result, Storage, WorkBudget};

use super::tables::Tables;

/// Bytes of a table that are read at once, a multiple of the size of each kind of entry.
pub(super) const PIECE: u64 = 1 << 20;
/// Bytes of a table between two looks at the budget.
const PART: usize = 4096;
/// The cost of visiting an entry, in the unit of [`WorkBudget`]: some nanoseconds.
const VISIT: u64 = 64;

/// Passes the entries of a table whose numbers are in `range` to `visit`, each with its number,
/// except those of which each byte is `unused`. The first entry of the table is at `offset` of the
/// file.
///
/// # Errors
/// `Corrupt` if the file ends before the table does; errors of the storage or of `visit`.
pub(super) async fn scan<S: Storage, const N: usize>(
    tables: &Tables<'_, S>,
    offset: u64,
    range: Range<u64>,
    unused: u8,
    mut visit: impl FnMut(u64, [u8; N]) -> Result<()>,
) -> Result<()> {
    let (budget, size) = (WorkBudget::new(), N as u64);
    for first in range.clone().step_by((PIECE / size) as usize) {
        let count = (range.end - first).min(PIECE / size);
        let bytes = tables.read(offset + first * size, (count * size) as usize).await?;
        visit_used(&bytes, unused, &budget, |number, entry| visit(first + number, entry)).await?;
    }
    Ok(())
}

/// Passes the entries in `bytes` to `visit`, each with its number, except those of which each byte
/// is `unused`. A part of the table that has only unused entries, as most parts have, is skipped
/// after one comparison.
///
/// # Errors
/// Errors of `visit`.
pub(super) async fn visit_used<const N: usize>(
    bytes: &[u8],
    unused: u8,
    budget: &WorkBudget,
    mut visit: impl FnMut(u64, [u8; N]) -> Result<()>,
) -> Result<()> {
    let mut number = 0;
    for part in bytes.chunks(PART) {
        let (entries, _) = part.as_chunks::<N>();
        budget.spend(part.len() as u64).await;
        if !consists_of(part, unused) {
            budget.charge(VISIT * entries.len() as u64);
            for (index, &entry) in entries.iter().enumerate() {
                if entry != [unused; N] {
                    visit(number + index as u64, entry)?;
                }
            }
        }
        number += entries.len() as u64;
    }
    Ok(())
}

/// Whether each byte is `value`: the first one is, and each other one equals the one before.
fn consists_of(bytes: &[u8], value: u8) -> bool {
    match bytes {
        [first, rest @ ..] => *first == value && bytes[..rest.len()] == *rest,
        [] => true,
    }
}

#[cfg(test)]
mod tests {
    use blockhouse_sim::{Config, Sim, SimDisk};

    use super::*;
    use crate::foreign::tables::PageCache;

    #[test]
    fn used_entries_are_visited_and_a_table_is_read_in_few_pieces() {
        let sim = Sim::new(1);
        let count = 3 * PIECE / 4 + 7;
        let mut bytes = vec![0xff; (512 + 4 * count) as usize];
        let used = [0, 1, 1023, 1024, PIECE / 4 - 1, PIECE / 4, count - 2, count - 1];
        for (value, entry) in (0..).zip(used) {
            let at = (512 + 4 * entry) as usize;
            bytes[at..at + 4].copy_from_slice(&u32::to_le_bytes(value));
        }
        let storage = SimDisk::new(&sim, Config::default(), bytes);
        sim.block_on(async move {
            let (cache, mut found) = (PageCache::default(), Vec::new());
            let tables = Tables::new(&storage, &cache, None);
            let visit = |number, entry| {
                found.push((number, u32::from_le_bytes(entry)));
                Ok(())
            };
            scan(&tables, 512, 1..count - 1, 0xff, visit).await.unwrap();
            let expected: Vec<_> = used.into_iter().zip(0..).skip(1).take(6).collect();
            assert_eq!(found, expected);
            let requests = storage.counts().0;
            assert!(requests <= 8, "{requests} requests for 3 MiB");
            let beyond = scan::<_, 4>(&tables, 512, 0..count + 1, 0xff, |_, _| Ok(())).await;
            assert!(beyond.unwrap_err().to_string().contains("past the end of the file"));
        });
    }
}
