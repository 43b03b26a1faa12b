//! A cache of look-ups in a chain: how many backing files a read of a part of the disk can skip.
//!
//! The disk is divided into granules. An entry is the number of backing files, from the nearest one
//! on, that leave all of the granule to their own backing files.
//!
//! Guarantees:
//! - A found entry has a value that was set for its granule: the last one, unless two threads set
//!   entries of one word at the same time. An entry may be lost at any time; then the layers are
//!   looked up again.
//! - Memory: two bytes for each granule, allocated in chunks of 4 KiB when they are needed;
//!   [`MAX_BYTES`] at most, however large the disk is.
//! - No locks. Threads may get and set the same entries at the same time.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum bytes of a table: enough for 128 GiB of a disk in granules of 64 KiB.
const MAX_BYTES: u64 = 4 << 20;
/// Entries of a word. The lower half of a word has the entries of neighbouring granules, one byte
/// each; the upper half has their tag. A word is read and written as a whole, so it never has the
/// entries of one group with the tag of another.
const ENTRIES: u64 = 4;
/// Words that are allocated together.
const CHUNK: usize = 512;
const CHUNK_BYTES: u64 = CHUNK as u64 * 8;
const TAG_SHIFT: u32 = 32;
/// The largest number that fits into an entry.
const MAX_SKIPS: usize = 254;

/// See the module's page.
pub(super) struct SkipTable {
    /// A power of two of chunks, each allocated when it is first needed.
    chunks: Box<[OnceLock<Box<[AtomicU64]>>]>,
}

/// Location of an entry, if it is stored.
#[derive(Clone, Copy)]
struct Place {
    chunk: usize,
    word: usize,
    /// The position of the entry's lowest bit in the word.
    shift: u32,
    tag: u64,
}

impl SkipTable {
    /// A table for a disk of this many granules. If the disk grows later, the table stays as it is.
    pub(super) fn new(granules: u64) -> Self {
        let words = granules.div_ceil(ENTRIES);
        let chunks = words.div_ceil(CHUNK as u64).clamp(1, MAX_BYTES / CHUNK_BYTES);
        let chunks = chunks.next_power_of_two() as usize;
        Self { chunks: std::iter::repeat_with(OnceLock::new).take(chunks).collect() }
    }

    /// The number of backing files that can be skipped for the granule, if known.
    pub(super) fn get(&self, granule: u64) -> Option<usize> {
        let place = self.place(granule)?;
        let word = self.chunks[place.chunk].get()?[place.word].load(Ordering::Relaxed);
        let skips = (word >> place.shift) as u8;
        (word >> TAG_SHIFT == place.tag).then_some(skips)?.checked_sub(1).map(usize::from)
    }

    /// Remembers that `skips` backing files can be skipped for the granule. If the word has entries
    /// of another group of granules, these are lost.
    pub(super) fn set(&self, granule: u64, skips: usize) {
        let Some(place) = self.place(granule) else { return };
        let chunk = self.chunks[place.chunk]
            .get_or_init(|| std::iter::repeat_with(AtomicU64::default).take(CHUNK).collect());
        let word = &chunk[place.word];
        let known = word.load(Ordering::Relaxed);
        let kept = if known >> TAG_SHIFT == place.tag {
            known & !(0xff << place.shift)
        } else {
            place.tag << TAG_SHIFT
        };
        let skips = skips.min(MAX_SKIPS) as u64 + 1;
        // If another thread stores the word between the load and this store, its entry is lost, and
        // an older value of its granule may return.
        word.store(kept | skips << place.shift, Ordering::Relaxed);
    }

    /// `None` for granules that the tags cannot distinguish.
    fn place(&self, granule: u64) -> Option<Place> {
        let group = granule / ENTRIES;
        let words = (self.chunks.len() * CHUNK) as u64;
        let (index, tag) = ((group % words) as usize, group / words);
        let shift = (granule % ENTRIES) as u32 * 8;
        let place = Place { chunk: index / CHUNK, word: index % CHUNK, shift, tag };
        u32::try_from(tag).is_ok().then_some(place)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// Granules that share words.
    fn granule() -> impl Strategy<Value = u64> {
        let words = MAX_BYTES / 8 * ENTRIES;
        prop_oneof![
            4 => 0..24_u64,
            4 => (0..24_u64).prop_map(move |granule| granule + words),
            2 => (0..24_u64).prop_map(move |granule| granule + 5 * words),
            1 => any::<u64>(),
        ]
    }

    proptest! {
        #[test]
        fn what_is_found_is_what_was_set_last(
            size in prop_oneof![1..100_u64, Just(u64::MAX)],
            sets in vec((granule(), 0..300_usize), 1..80),
        ) {
            let table = SkipTable::new(size);
            let mut model = HashMap::new();
            for (granule, skips) in sets {
                table.set(granule, skips);
                model.insert(granule, skips.min(MAX_SKIPS));
                for (&granule, &skips) in &model {
                    if let Some(found) = table.get(granule) {
                        prop_assert_eq!(found, skips, "granule {}", granule);
                    }
                }
                if granule < 1 << 40 {
                    prop_assert_eq!(table.get(granule), Some(model[&granule]));
                }
            }
        }
    }

    #[test]
    fn all_granules_of_a_disk_have_their_entries() {
        let table = SkipTable::new(100_000);
        (0..100_000).for_each(|granule| table.set(granule, granule as usize % 200));
        assert!((0..100_000).all(|granule| table.get(granule) == Some(granule as usize % 200)));
        assert_eq!(table.get(100_000), None);
    }

    #[test]
    fn memory_is_bounded_and_taken_when_it_is_used() {
        let table = SkipTable::new(u64::MAX);
        let used =
            |table: &SkipTable| table.chunks.iter().filter(|one| one.get().is_some()).count();
        assert_eq!(used(&table), 0);
        table.set(1 << 50, 3);
        assert_eq!((used(&table), table.get(1 << 50)), (1, Some(3)));
        assert_eq!(table.chunks.len() as u64 * CHUNK_BYTES, MAX_BYTES);
    }
}
