//! Where the old bytes of each block of a frozen disk are.
//!
//! Guarantees: a block is unsaved, claimed by one change that copies it, or saved; what is saved
//! stays so. A claim that is dropped makes what it has not finished unsaved again. Any thread may
//! ask at any time, and no lock is held across a wait.
//!
//! Memory: 16 bytes for each region of 64 MiB; 4 KiB more when its first block is claimed; 64 bytes
//! for each granule of 64 KiB that is saved in parts, as far as a limit goes (and a quarter more in
//! reserve). Beyond the limit granules are claimed whole, and need none.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use blockhouse_core::sync::Condvar;
use blockhouse_core::{ByteRange, Error, ErrorKind, Result};
use parking_lot::Mutex;

use super::region::{BLOCK, GRANULE, Place, REGION, Region, TABLE_BYTES, Word};

/// See the module's page.
pub(super) struct Index {
    size: u64,
    regions: Box<[Mutex<Option<Box<Region>>>]>,
    /// Bytes that tables of granules may take, and take.
    max_tables: u64,
    tables: AtomicU64,
    /// A claim ended, or was finished in part.
    changed: Condvar,
}

/// The next step of a change.
pub(super) enum Claim<'a> {
    /// Nothing: all of its range is saved.
    Nothing,
    /// To wait: another change copies the first block that is not saved.
    Wait,
    /// To copy these blocks.
    Copy(Claimed<'a>),
}

/// Blocks that one change copies: [`Index::claim`].
pub(super) struct Claimed<'a> {
    index: &'a Index,
    rest: ByteRange,
}

impl Index {
    /// For a disk of `size` bytes, nothing of which is saved. Tables of granules take `max_tables`
    /// bytes at most.
    ///
    /// # Errors
    /// `Io` if the host has no memory for the list of regions.
    pub(super) fn new(size: u64, max_tables: u64) -> Result<Self> {
        let count = size.div_ceil(REGION) as usize;
        let mut regions = Vec::new();
        regions.try_reserve_exact(count).map_err(|_| {
            let what = format!("no memory for a list of {count} regions of a disk");
            Error::new(ErrorKind::Io, what)
        })?;
        regions.resize_with(count, Mutex::default);
        let (tables, changed) = (AtomicU64::new(0), Condvar::new());
        Ok(Self { size, regions: regions.into(), max_tables, tables, changed })
    }

    /// Notified when a change that had to [wait](Claim::Wait) may try again.
    pub(super) fn changed(&self) -> &Condvar {
        &self.changed
    }

    /// Whether all of `range`, which is on the disk, is saved.
    pub(super) fn is_saved(&self, range: ByteRange) -> bool {
        parts(range).all(|(number, mut blocks)| match &*self.regions[number].lock() {
            None => false,
            Some(region) => blocks.all(|block| region.get(block).is_saved()),
        })
    }

    /// Claims the first blocks of `range`, which is on the disk, that are not saved, as far as they
    /// follow each other in a region; perhaps some blocks around them, in the same granules.
    pub(super) fn claim(&self, range: ByteRange) -> Claim<'_> {
        for (number, blocks) in parts(range) {
            let mut region = self.regions[number].lock();
            let region = region.get_or_insert_default();
            let Some(first) = blocks.clone().find(|block| !region.get(*block).is_saved()) else {
                continue;
            };
            if region.get(first) == Word::CLAIMED {
                return Claim::Wait;
            }
            let start = number as u64 * REGION;
            let end = (self.size - start).min(REGION).div_ceil(BLOCK) as usize;
            let has_room = self.tables.load(Ordering::Relaxed) < self.max_tables;
            let (run, tables) = region.claim(first..blocks.end, end, has_room);
            self.tables.fetch_add(tables * TABLE_BYTES, Ordering::Relaxed);
            let offset = |block: usize| (start + block as u64 * BLOCK).min(self.size);
            let rest = ByteRange::between(offset(run.start), offset(run.end));
            return Claim::Copy(Claimed { index: self, rest });
        }
        Claim::Nothing
    }

    /// Location of the first bytes of `range`, which is on the disk and not empty, and the number
    /// of bytes there. Bytes in the log are adjacent.
    pub(super) fn lookup(&self, range: ByteRange) -> (Place, u64) {
        let mut found: Option<(Place, u64)> = None;
        'regions: for (number, mut blocks) in parts(range) {
            let region = self.regions[number].lock();
            while !blocks.is_empty() {
                let (place, count) = match &*region {
                    None => (Place::Source, blocks.len()),
                    Some(region) => region.place(blocks.start),
                };
                let count = count.min(blocks.len());
                match &mut found {
                    None => found = Some((place, count as u64 * BLOCK)),
                    Some((first, length)) if first.skip(*length) == place => {
                        *length += count as u64 * BLOCK;
                    }
                    Some(_) => break 'regions,
                }
                blocks.start += count;
            }
        }
        let (place, length) = found.unwrap_or((Place::Source, BLOCK));
        let within = range.offset() % BLOCK;
        (place.skip(within), (length - within).min(range.length()))
    }

    fn region<T>(&self, range: ByteRange, act: impl FnOnce(&mut Region, Range<usize>) -> T) {
        if let Some((number, blocks)) = parts(range).next()
            && let Some(region) = &mut *self.regions[number].lock()
        {
            act(region, blocks);
        }
    }
}

impl Claimed<'_> {
    /// The rest to be copied.
    pub(super) fn rest(&self) -> ByteRange {
        self.rest
    }

    /// The first bytes of the rest: of as many granules as `length` bytes have.
    pub(super) fn first_granules(&self, length: u64) -> ByteRange {
        let end = (self.rest.offset() / GRANULE) * GRANULE + length;
        self.rest.truncate(end - self.rest.offset())
    }

    /// The rest without its first granule, or part of one, which is saved now: in `place`, all
    /// together.
    pub(super) fn finish_part(&mut self, place: Place) {
        let part = self.first_granules(GRANULE);
        self.index.region(part, |region, blocks| region.finish(blocks, place));
        self.rest = self.rest.skip(part.length());
        self.index.changed.notify_all();
    }

    /// As [`finish_part`](Self::finish_part), for all granules up to `end`: they are zeros.
    pub(super) fn finish_zeros(&mut self, end: u64) {
        while !self.rest.is_empty() && self.first_granules(GRANULE).end() <= end {
            self.finish_part(Place::Zeros);
        }
    }
}

impl Drop for Claimed<'_> {
    fn drop(&mut self) {
        if !self.rest.is_empty() {
            self.index.region(self.rest, Region::release);
            self.index.changed.notify_all();
        }
    }
}

/// The parts of a range, a region each: its number, and the blocks of it that the range touches.
fn parts(range: ByteRange) -> impl Iterator<Item = (usize, Range<usize>)> {
    let (first, last) = (range.offset() / REGION, range.end().div_ceil(REGION));
    (first..last).map(move |number| {
        let start = number * REGION;
        let from = range.offset().max(start) - start;
        let to = range.end().min(start + REGION) - start;
        (number as usize, (from / BLOCK) as usize..to.div_ceil(BLOCK) as usize)
    })
}

#[cfg(test)]
mod tests;
