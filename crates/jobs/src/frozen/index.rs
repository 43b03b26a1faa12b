//! The index: the location of the old bytes of each block of a frozen disk.
//!
//! Guarantees: a block is unsaved, claimed by one change that copies it, or saved; a saved block
//! stays saved. When a claim is dropped, its blocks that are not saved become unsaved again. Any
//! thread may call any method at any time, and no lock is held across a wait.
//!
//! Memory: 16 bytes for each region of 64 MiB; 4 KiB more when its first block is claimed; a table
//! of 64 bytes for each granule of 64 KiB that is saved in parts, up to a limit. The limit does not
//! count the reserve of each region: 8 tables and a quarter of its tables. Beyond the limit,
//! granules are claimed whole, and need no table.

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
    /// The limit for the bytes of all tables of granules; `tables` is their present number of
    /// bytes.
    max_tables: u64,
    tables: AtomicU64,
    /// Notified when a claim has ended, or was finished in part.
    changed: Condvar,
}

/// The next step of a change.
pub(super) enum Claim<'a> {
    /// Nothing: the whole range of the change is saved.
    Nothing,
    /// Wait: another change copies the first block that is not saved.
    Wait,
    /// Copy these blocks.
    Copy(Claimed<'a>),
}

/// Blocks that one change has claimed and copies.
pub(super) struct Claimed<'a> {
    index: &'a Index,
    rest: ByteRange,
}

impl Index {
    /// An index for a disk of `size` bytes without saved blocks. No further tables of granules are
    /// made once they take `max_tables` bytes.
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

    /// Claims the first unsaved blocks of `range` that are adjacent and in one region, and perhaps
    /// blocks around them in the same granules. `range` is on the disk.
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

    /// The location of the first bytes of `range`, and the number of bytes that continue there: in
    /// the disk in use, as zeros, or adjacent in the log. `range` is on the disk and not empty.
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
    /// The claimed bytes that are not saved yet.
    pub(super) fn rest(&self) -> ByteRange {
        self.rest
    }

    /// The bytes of the rest in its first granules; these granules have `length` bytes together.
    pub(super) fn first_granules(&self, length: u64) -> ByteRange {
        let end = (self.rest.offset() / GRANULE) * GRANULE + length;
        self.rest.truncate(end - self.rest.offset())
    }

    /// Records that the first granule of the rest, or the claimed part of it, was saved at `place`
    /// as a whole. It is no longer in the rest.
    pub(super) fn finish_part(&mut self, place: Place) {
        let part = self.first_granules(GRANULE);
        self.index.region(part, |region, blocks| region.finish(blocks, place));
        self.rest = self.rest.skip(part.length());
        self.index.changed.notify_all();
    }

    /// As [`finish_part`](Self::finish_part), for zeros in all granules of the rest up to `end`.
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

/// The parts of a range, one for each region: the region's number, and its blocks that the range
/// touches.
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
