//! The locations of the old bytes of a region: one word for each granule, or for each of its
//! blocks.
//!
//! A region is a part of the disk, with the guarantees of the index (`index`). A granule has one
//! word as long as its blocks are claimed and saved as a whole. From the first claim of a part of
//! it on, the granule has a table with one word for each block.

use std::ops::Range;

/// The unit that is saved, in bytes.
pub(super) const BLOCK: u64 = 4 << 10;
/// Blocks of a granule: they share one word if they are saved as a whole.
const GRANULE_BLOCKS: usize = 16;
/// Bytes of a granule.
pub(super) const GRANULE: u64 = BLOCK * GRANULE_BLOCKS as u64;
/// Bytes of a region.
pub(super) const REGION: u64 = 64 << 20;
const REGION_GRANULES: usize = (REGION / GRANULE) as usize;

/// Maximum bytes of a log: 8 TiB less 12 KiB, because a word cannot number more blocks.
pub(super) const MAX_LOG: u64 = ((1 << 31) - Word::FIRST_LOG as u64) * BLOCK;
/// Bytes of a granule's table.
pub(super) const TABLE_BYTES: u64 = size_of::<Table>() as u64;

/// The location of old bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In the disk in use: the bytes are not saved, but their copy may be in progress.
    Source,
    /// Nowhere: they are zeros.
    Zeros,
    /// In the log, from this byte on.
    Log(u64),
}

impl Place {
    /// The location `length` bytes further, if both were saved together.
    pub(super) fn skip(self, length: u64) -> Self {
        match self {
            Self::Log(at) => Self::Log(at + length),
            Self::Source | Self::Zeros => self,
        }
    }
}

/// State of a block, or of all blocks of a granule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Word(u32);

impl Word {
    pub(super) const UNSAVED: Self = Self(0);
    /// A change copies the block.
    pub(super) const CLAIMED: Self = Self(1);
    const ZEROS: Self = Self(2);
    /// From this value on, words are numbers of blocks of the log.
    const FIRST_LOG: u32 = 3;
    /// The flag of a granule with a table. The other bits are the number of the table.
    const TABLE: u32 = 1 << 31;

    pub(super) fn is_saved(self) -> bool {
        self.0 >= Self::ZEROS.0
    }

    fn table(self) -> Option<usize> {
        (self.0 & Self::TABLE != 0).then_some((self.0 & !Self::TABLE) as usize)
    }

    /// The state of the block `count` blocks after a block in this state, if both were saved
    /// together.
    fn of_next(self, count: usize) -> Self {
        if self.0 >= Self::FIRST_LOG { Self(self.0 + count as u32) } else { self }
    }

    fn place(self) -> Place {
        match self {
            Self::UNSAVED | Self::CLAIMED => Place::Source,
            Self::ZEROS => Place::Zeros,
            Self(word) => Place::Log(u64::from(word - Self::FIRST_LOG) * BLOCK),
        }
    }
}

impl From<Place> for Word {
    /// The word of a block whose old bytes begin at `place`. A `place` in the log is the start of a
    /// block, below `MAX_LOG`.
    fn from(place: Place) -> Self {
        match place {
            Place::Source => Self::UNSAVED,
            Place::Zeros => Self::ZEROS,
            Place::Log(at) => Self((at / BLOCK) as u32 + Self::FIRST_LOG),
        }
    }
}

type Table = [Word; GRANULE_BLOCKS];

/// A region is dense if at least one in this many of its blocks is saved or claimed. Then changes
/// are likely to touch the other blocks, too.
const DENSE: usize = 16;

/// See the module's page. Blocks are numbered from the start of the region.
pub(super) struct Region {
    granules: [Word; REGION_GRANULES],
    tables: Vec<Table>,
    /// Blocks that are saved or claimed.
    taken: usize,
}

impl Default for Region {
    fn default() -> Self {
        let granules = [Word::UNSAVED; REGION_GRANULES];
        Self { granules, tables: Vec::new(), taken: 0 }
    }
}

impl Region {
    /// The state of a block.
    pub(super) fn get(&self, block: usize) -> Word {
        let (granule, within) = (self.granules[block / GRANULE_BLOCKS], block % GRANULE_BLOCKS);
        match granule.table() {
            Some(table) => self.tables[table][within],
            None => granule.of_next(within),
        }
    }

    /// The location of a block's old bytes, and the minimum number of blocks, from this one on,
    /// that are adjacent there.
    pub(super) fn place(&self, block: usize) -> (Place, usize) {
        let has_table = self.granules[block / GRANULE_BLOCKS].table().is_some();
        let count = if has_table { 1 } else { GRANULE_BLOCKS - block % GRANULE_BLOCKS };
        (self.get(block).place(), count)
    }

    fn is_unsaved(&self, block: &usize) -> bool {
        self.get(*block) == Word::UNSAVED
    }

    /// Claims the unsaved blocks at the start of `wanted`; its first block is unsaved. For
    /// sequential changes, the claim is longer, within its last granule, by as many blocks as are
    /// claimed or saved directly before it. In a dense region the claim includes the unsaved blocks
    /// around it in its granules, because one read of many blocks takes little longer than a read
    /// of one. Without `has_room`, granules without a table are claimed whole. The region has `end`
    /// blocks. Returns the claimed blocks, and the number of new tables.
    pub(super) fn claim(
        &mut self,
        wanted: Range<usize>,
        end: usize,
        has_room: bool,
    ) -> (Range<usize>, u64) {
        let before = (0..wanted.start).rev().take(GRANULE_BLOCKS);
        let before = before.take_while(|block| !self.is_unsaved(block)).count();
        let mut run = wanted.clone();
        run.end = run.start + wanted.take_while(|block| self.is_unsaved(block)).count();
        let granule_end = run.end.next_multiple_of(GRANULE_BLOCKS).min(end);
        let ahead = (run.end..granule_end).take(before);
        run.end += ahead.take_while(|block| self.is_unsaved(block)).count();
        if self.taken * DENSE >= end {
            let granule = run.start - run.start % GRANULE_BLOCKS;
            let before = (granule..run.start).rev();
            run.start -= before.take_while(|block| self.is_unsaved(block)).count();
            let after = run.end..run.end.next_multiple_of(GRANULE_BLOCKS).min(end);
            run.end += after.take_while(|block| self.is_unsaved(block)).count();
        }
        if !has_room {
            let whole = |block: usize| {
                let start = block - block % GRANULE_BLOCKS;
                start..(start + GRANULE_BLOCKS).min(end)
            };
            if self.granules[run.start / GRANULE_BLOCKS] == Word::UNSAVED {
                run.start = whole(run.start).start;
            }
            if self.granules[(run.end - 1) / GRANULE_BLOCKS] == Word::UNSAVED {
                run.end = whole(run.end - 1).end;
            }
        }
        self.taken += run.len();
        let tables = self.tables.len();
        for part in granules(run.clone()) {
            let is_whole = part.len() == GRANULE_BLOCKS || part.end == end;
            self.mark_claimed(part.clone(), is_whole && part.start % GRANULE_BLOCKS == 0);
        }
        (run, (self.tables.len() - tables) as u64)
    }

    /// Marks blocks of one granule as claimed: all of its blocks if `is_whole`.
    fn mark_claimed(&mut self, part: Range<usize>, is_whole: bool) {
        let granule = part.start / GRANULE_BLOCKS;
        if self.granules[granule] == Word::UNSAVED {
            if is_whole {
                self.granules[granule] = Word::CLAIMED;
                return;
            }
            self.granules[granule] = Word(Word::TABLE | self.tables.len() as u32);
            if self.tables.len() == self.tables.capacity() {
                self.tables.reserve_exact(8 + self.tables.len() / 4);
            }
            self.tables.push([Word::UNSAVED; GRANULE_BLOCKS]);
        }
        self.set(part, Word::CLAIMED);
    }

    /// Sets the location of claimed blocks of one granule, which were saved at `place` as a whole.
    /// `part` is all that the claim has of the granule.
    pub(super) fn finish(&mut self, part: Range<usize>, place: Place) {
        self.set(part, place.into());
    }

    /// Makes claimed blocks unsaved again.
    pub(super) fn release(&mut self, run: Range<usize>) {
        self.taken -= run.len();
        for part in granules(run) {
            self.set(part, Word::UNSAVED);
        }
    }

    fn set(&mut self, part: Range<usize>, word: Word) {
        let granule = part.start / GRANULE_BLOCKS;
        match self.granules[granule].table() {
            None => self.granules[granule] = word,
            Some(table) => {
                for (index, block) in part.enumerate() {
                    self.tables[table][block % GRANULE_BLOCKS] = word.of_next(index);
                }
            }
        }
    }
}

/// The parts of a run, one for each granule.
fn granules(run: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let mut rest = run;
    std::iter::from_fn(move || {
        let end = (rest.start / GRANULE_BLOCKS + 1) * GRANULE_BLOCKS;
        let part = rest.start..end.min(rest.end);
        rest.start = part.end;
        (!part.is_empty()).then_some(part)
    })
}
