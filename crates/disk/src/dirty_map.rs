//! A map of the changed parts of a disk: one bit in memory for each granule.
//!
//! Guarantees: any thread may mark and clear at any time, without a lock. A mark is never lost: if
//! a range is marked and cleared concurrently, the range is dirty afterwards, or the clearing
//! thread sees all that the marking thread did before the mark. Memory is one bit for each granule,
//! taken when the map is made.

use std::sync::atomic::{AtomicU64, Ordering};

use blockhouse_core::{ByteRange, Error, ErrorKind, IoVector, Result};
use blockhouse_format::BitmapExtent;

use crate::observers::{ChangeId, ChangeObserver, ChangeWait};

/// Granules in one word.
const WORD: u64 = 64;

/// The granules of a disk that are dirty. See the module's page.
pub struct DirtyMap {
    size: u64,
    /// The binary logarithm of the bytes of a granule.
    shift: u32,
    words: Box<[AtomicU64]>,
    /// The number of bits that are set.
    dirty: AtomicU64,
}

impl DirtyMap {
    /// A map of a disk of `size` bytes, with nothing dirty. `granularity` is the bytes of a
    /// granule, a power of two.
    ///
    /// # Errors
    /// `InvalidInput` if `granularity` is no power of two; `Io` if the host has no memory for the
    /// bits.
    pub fn new(size: u64, granularity: u64) -> Result<Self> {
        if !granularity.is_power_of_two() {
            let what = format!("a granularity of {granularity} bytes is no power of two");
            return Err(Error::new(ErrorKind::InvalidInput, what));
        }
        let count = size.div_ceil(granularity).div_ceil(WORD) as usize;
        let mut words = Vec::new();
        words.try_reserve_exact(count).map_err(|_| {
            let what = format!("no memory for a map of {count} words of what has changed");
            Error::new(ErrorKind::Io, what)
        })?;
        words.resize_with(count, AtomicU64::default);
        let shift = granularity.trailing_zeros();
        Ok(Self { size, shift, words: words.into(), dirty: AtomicU64::new(0) })
    }

    /// Bytes of the disk.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The finest granularity in bytes, at least 1, with which a map of a disk of `size` bytes
    /// takes at most `memory` bytes.
    pub fn min_granularity(size: u64, memory: u64) -> u64 {
        size.div_ceil(memory.max(8) * 8).max(1).next_power_of_two()
    }

    /// Bytes of a granule.
    pub fn granularity(&self) -> u64 {
        1 << self.shift
    }

    /// The number of dirty bytes, in whole granules: up to one granule more than the disk's size.
    /// An estimate while other threads mark and clear.
    pub fn dirty_bytes(&self) -> u64 {
        self.dirty.load(Ordering::Relaxed) << self.shift
    }

    /// Marks all granules that `range` touches as dirty; bytes past the end are ignored. Returns
    /// whether any of them was clean.
    pub fn mark(&self, range: ByteRange) -> bool {
        let mut fresh = 0;
        self.for_each_word(range, |word, bits| {
            // A word that needs no change is only read, so that writers of a dirty region share the
            // cache line.
            if word.load(Ordering::SeqCst) & bits != bits {
                let before = word.fetch_or(bits, Ordering::SeqCst);
                fresh += u64::from((bits & !before).count_ones());
            }
        });
        self.dirty.fetch_add(fresh, Ordering::Relaxed);
        fresh > 0
    }

    /// Marks all granules that `range` touches as clean.
    pub fn clear(&self, range: ByteRange) {
        let mut cleared = 0;
        self.for_each_word(range, |word, bits| {
            cleared += u64::from((word.fetch_and(!bits, Ordering::SeqCst) & bits).count_ones());
        });
        self.dirty.fetch_sub(cleared, Ordering::Relaxed);
    }

    /// Whether any granule that `range` touches is dirty.
    pub fn is_dirty(&self, range: ByteRange) -> bool {
        let mut is_dirty = false;
        self.for_each_word(range, |word, bits| is_dirty |= word.load(Ordering::SeqCst) & bits != 0);
        is_dirty
    }

    /// The first run of dirty granules at `offset` or after it, at most `limit` bytes but at least
    /// one granule. The granules stay dirty. The run starts and ends at granule boundaries, except
    /// at the end of the disk. `None` if there is no run.
    pub fn next(&self, offset: u64, limit: u64) -> Option<ByteRange> {
        self.next_run(offset, limit, true)
    }

    /// As [`next`](Self::next), for clean granules.
    pub fn next_clean(&self, offset: u64, limit: u64) -> Option<ByteRange> {
        self.next_run(offset, limit, false)
    }

    fn next_run(&self, offset: u64, limit: u64, is_dirty: bool) -> Option<ByteRange> {
        if offset >= self.size {
            return None;
        }
        let first = self.find(offset >> self.shift, is_dirty, self.granules())?;
        let most = self.granules().min(first + (limit >> self.shift).max(1));
        let end = self.find(first, !is_dirty, most).unwrap_or(most);
        // Another thread may have changed the first granule meanwhile.
        let (start, end) = (first << self.shift, (end.max(first + 1) << self.shift).min(self.size));
        Some(ByteRange::between(start, end))
    }

    /// The dirty and clean ranges in `range`, as a bitmap returns them: adjacent extents, `max`
    /// unless there are fewer.
    pub fn extents(&self, range: ByteRange, max: usize) -> Vec<BitmapExtent> {
        let mut extents = Vec::new();
        let mut rest = range;
        while !rest.is_empty() && extents.len() < max {
            let run = self.next(rest.offset(), u64::MAX);
            let start = run.map_or(rest.end(), |run| run.offset().clamp(rest.offset(), rest.end()));
            let (is_dirty, end) = match run {
                Some(run) if start == rest.offset() => (true, run.end().min(rest.end())),
                _ => (false, start),
            };
            let length = end - rest.offset();
            extents.push(BitmapExtent { length, is_dirty });
            rest = rest.skip(length);
        }
        extents
    }

    /// The bits, at least one word: 64 granules in a word, the first granule in the lowest bit.
    pub fn words(&self) -> impl Iterator<Item = u64> {
        let none = self.words.is_empty().then_some(0);
        self.words.iter().map(|word| word.load(Ordering::SeqCst)).chain(none)
    }

    fn granules(&self) -> u64 {
        self.size.div_ceil(self.granularity())
    }

    /// The first granule from `start` on and before `end` whose bit is `wanted`.
    fn find(&self, start: u64, wanted: bool, end: u64) -> Option<u64> {
        let mut index = (start / WORD) as usize;
        let mut mask = u64::MAX << (start % WORD);
        while let Some(word) = self.words.get(index).filter(|_| index as u64 * WORD < end) {
            let word = word.load(Ordering::SeqCst);
            let found = if wanted { word } else { !word } & mask;
            if found != 0 {
                let granule = index as u64 * WORD + u64::from(found.trailing_zeros());
                return Some(granule).filter(|granule| *granule < end);
            }
            (index, mask) = (index + 1, u64::MAX);
        }
        None
    }

    fn for_each_word(&self, range: ByteRange, mut act: impl FnMut(&AtomicU64, u64)) {
        let end = range.end().min(self.size);
        if range.is_empty() || range.offset() >= end {
            return;
        }
        let (first, last) = (range.offset() >> self.shift, (end - 1) >> self.shift);
        for index in first / WORD..=last / WORD {
            let low = first.saturating_sub(index * WORD);
            let high = (last - index * WORD).min(WORD - 1);
            let bits = (u64::MAX << low) & (u64::MAX >> (WORD - 1 - high));
            act(&self.words[index as usize], bits);
        }
    }
}

/// Each change of a disk is marked when it begins, whether it succeeds or not.
impl ChangeObserver for DirtyMap {
    fn begins(&self, range: ByteRange, _bytes: Option<&IoVector>) -> ChangeId {
        self.mark(range);
        0
    }

    fn completed(&self, _change: ChangeId, _range: ByteRange) -> Option<ChangeWait> {
        None
    }

    fn abandoned(&self, _change: ChangeId, _range: ByteRange) {}
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const GRANULE: u64 = 4096;

    fn range(start: u64, length: u64) -> ByteRange {
        ByteRange::between(start, start + length)
    }

    proptest! {
        #[test]
        fn it_is_a_set_of_granules(
            size in 1..400 * GRANULE,
            steps in prop::collection::vec((0..3_u8, 0..420 * GRANULE, 0..80 * GRANULE), 1..40),
        ) {
            let map = DirtyMap::new(size, GRANULE).unwrap();
            let mut model = BTreeSet::new();
            let count = size.div_ceil(GRANULE);
            for (what, start, length) in steps {
                let touched = if length == 0 || start >= size { 0..0 } else {
                    start / GRANULE..(start + length).min(size).div_ceil(GRANULE)
                };
                match what {
                    0 => {
                        let fresh = touched.clone().any(|granule| !model.contains(&granule));
                        prop_assert_eq!(map.mark(range(start, length)), fresh);
                        model.extend(touched);
                    }
                    1 => {
                        map.clear(range(start, length));
                        model.retain(|granule| !touched.contains(granule));
                    }
                    _ => {
                        let first = model.range(start / GRANULE..).next().copied();
                        let first = first.filter(|_| start < size);
                        let taken = map.next(start, length).inspect(|range| map.clear(*range));
                        prop_assert_eq!(taken.map(|taken| taken.offset() / GRANULE), first);
                        if let Some(taken) = taken {
                            let end = taken.end().div_ceil(GRANULE);
                            prop_assert!(taken.length() <= length.max(GRANULE) && taken.end() <= size);
                            let is_longest = end == count || !model.contains(&end)
                                || taken.length() + GRANULE > length;
                            prop_assert!(is_longest);
                            for granule in first.unwrap()..end {
                                prop_assert!(model.remove(&granule));
                            }
                        }
                    }
                }
                let clean = (start / GRANULE..count).find(|granule| !model.contains(granule));
                let clean = clean.filter(|_| start < size);
                let found = map.next_clean(start, length);
                prop_assert_eq!(found.map(|found| found.offset() / GRANULE), clean);
                if let Some(found) = found {
                    prop_assert!(found.length() <= length.max(GRANULE) && found.end() <= size);
                    for granule in found.offset() / GRANULE..found.end().div_ceil(GRANULE) {
                        prop_assert!(!model.contains(&granule));
                    }
                }
                prop_assert_eq!(map.dirty_bytes(), model.len() as u64 * GRANULE);
                for granule in 0..count {
                    let is_dirty = map.is_dirty(range(granule * GRANULE, 1));
                    prop_assert_eq!(is_dirty, model.contains(&granule));
                }
            }
        }
    }

    #[test]
    fn no_mark_is_lost_between_threads() {
        let map = DirtyMap::new(64 * GRANULE, GRANULE).unwrap();
        let counts: [AtomicU64; 64] = std::array::from_fn(|_| AtomicU64::new(0));
        let seen: [AtomicU64; 64] = std::array::from_fn(|_| AtomicU64::new(0));
        std::thread::scope(|scope| {
            let marking = scope.spawn(|| {
                for step in 0..20_000_u64 {
                    let granule = step * 7 % 64;
                    counts[granule as usize].fetch_add(1, Ordering::Relaxed);
                    map.mark(range(granule * GRANULE, 1));
                }
            });
            let take_all = || {
                while let Some(taken) = map.next(0, GRANULE) {
                    map.clear(taken);
                    let granule = (taken.offset() / GRANULE) as usize;
                    seen[granule].store(counts[granule].load(Ordering::Relaxed), Ordering::Relaxed);
                }
            };
            while !marking.is_finished() {
                take_all();
            }
            take_all();
        });
        for (count, seen) in counts.iter().zip(&seen) {
            assert_eq!(count.load(Ordering::Relaxed), seen.load(Ordering::Relaxed));
        }
    }

    #[test]
    fn it_is_told_in_extents_of_a_range() {
        let dirty = DirtyMap::new(100 << 10, 4096).expect("memory");
        dirty.mark(ByteRange::between(8192, 20000));
        dirty.mark(ByteRange::between(99 << 10, 100 << 10));
        let told = |start, end, max| {
            let extents = dirty.extents(ByteRange::between(start, end), max).into_iter();
            extents.map(|one| (one.length, one.is_dirty)).collect::<Vec<_>>()
        };
        let all = [(8192, false), (12288, true), (77824, false), (4096, true)];
        assert_eq!(told(0, 100 << 10, 9), all);
        assert_eq!(told(0, 100 << 10, 2), all[..2]);
        assert_eq!(told(9000, 9100, 9), [(100, true)]);
        assert_eq!(told(20480, 98304, 9), [(77824, false)]);
        assert_eq!(told(0, 0, 9), []);
    }

    #[test]
    fn a_granularity_is_a_power_of_two() {
        assert!(DirtyMap::new(1 << 20, 3000).is_err());
    }
}
