//! The content of a bitmap for a range of the disk, as extents for block status.

use blockhouse_core::{ByteRange, Result, Storage};

use crate::qcow2::layout::bitmap_directory::BitmapEntry;
use crate::qcow2::writeback::Metadata;

use super::bits::BitRuns;
use super::live::LiveBitmaps;
use super::reader::{Bits, BitsReader};
use super::tracker::LiveBitmap;

/// A part of the disk, and whether it changed according to a bitmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitmapExtent {
    /// The length of the part in bytes.
    pub length: u64,
    /// Whether the part changed.
    pub is_dirty: bool,
}

/// Consecutive extents of a range. Neighbours differ in `is_dirty`.
struct Extents {
    rest: ByteRange,
    granularity_bits: u32,
    extents: Vec<BitmapExtent>,
}

impl Extents {
    fn new(range: ByteRange, granularity_bits: u32) -> Self {
        Self { rest: range, granularity_bits, extents: Vec::new() }
    }

    /// The first bit that is not added yet.
    fn next_bit(&self) -> u64 {
        self.rest.offset() >> self.granularity_bits
    }

    /// Adds the bits up to `end`, which are all set, or all clear.
    fn add(&mut self, end: u64, is_dirty: bool) {
        let end = end.saturating_mul(1 << self.granularity_bits).min(self.rest.end());
        let length = end.saturating_sub(self.rest.offset());
        self.rest = self.rest.skip(length);
        match self.extents.last_mut() {
            _ if length == 0 => {}
            Some(last) if last.is_dirty == is_dirty => last.length += length,
            _ => self.extents.push(BitmapExtent { length, is_dirty }),
        }
    }

    /// Adds `count` bits from `first` on, whose values are those of `bits`.
    fn add_bits(&mut self, first: u64, bits: &Bits, count: u64) {
        let bytes = match bits {
            Bits::Zeros => return self.add(first + count, false),
            Bits::Ones => return self.add(first + count, true),
            Bits::Some(bytes) => bytes,
        };
        for run in BitRuns::new(bytes, count) {
            self.add(first + run.start, false);
            self.add(first + run.end, true);
        }
        self.add(first + count, false);
    }

    fn is_complete(&self, max: usize) -> bool {
        // The last extent may continue, so one extent more than `max` is needed.
        self.rest.is_empty() || self.extents.len() > max
    }
}

/// The first extents of `range`: at least `max`, unless there are fewer. For an enabled bitmap of
/// an image that is open for writing, these are the changes recorded at this moment. `None` if
/// another bitmap replaces the bitmap: the caller reads its entry again, after
/// [`settled`](LiveBitmaps::settled).
///
/// # Errors
/// Errors of the storage, or `Corrupt`.
pub(crate) async fn extents_of<S: Storage>(
    metadata: &Metadata<S>,
    live: &LiveBitmaps,
    entry: &BitmapEntry,
    range: ByteRange,
    max: usize,
) -> Result<Option<Vec<BitmapExtent>>> {
    if let Some(bitmap) = live.find(&entry.name) {
        return extents_of_live(metadata, &bitmap, range, max).await;
    }
    let mut extents = Extents::new(range, entry.granularity_bits);
    let storage = metadata.storage();
    let reader = BitsReader::open(storage, metadata.geometry(), entry, metadata.size()).await?;
    while !extents.is_complete(max) {
        let cluster = extents.next_bit() / reader.cluster_bits();
        let bits = reader.read(cluster).await?;
        extents.add_bits(cluster * reader.cluster_bits(), &bits, reader.cluster_bits());
    }
    Ok(Some(extents.extents))
}

/// As [`extents_of`], for an enabled bitmap; `None` if another bitmap replaces it.
async fn extents_of_live<S: Storage>(
    metadata: &Metadata<S>,
    bitmap: &LiveBitmap,
    range: ByteRange,
    max: usize,
) -> Result<Option<Vec<BitmapExtent>>> {
    let mut extents = Extents::new(range, bitmap.granularity_bits());
    let page_bits = bitmap.page_bits();
    while !extents.is_complete(max) {
        let page = extents.next_bit() / page_bits;
        let Some(bits) = bitmap.page_of(metadata, page).await? else { return Ok(None) };
        extents.add_bits(page * page_bits, &bits, page_bits);
    }
    Ok(Some(extents.extents))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_become_extents_of_the_range() {
        let mut extents = Extents::new(ByteRange::between(1000, 512 * 24 + 100), 9);
        extents.add_bits(0, &Bits::Some(vec![0b110, 0xff]), 16);
        extents.add_bits(16, &Bits::Ones, 16);
        let found: Vec<_> =
            extents.extents.iter().map(|extent| (extent.length, extent.is_dirty)).collect();
        assert_eq!(found, [(536, true), (2560, false), (512 * 16 + 100, true)]);
        assert!(extents.is_complete(1));
    }
}
