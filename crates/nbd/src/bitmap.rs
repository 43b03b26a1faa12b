//! The bitmaps that an export offers.

use std::sync::Arc;

use blockhouse_core::{ByteRange, Result, Storage};
use blockhouse_disk::{BitmapExtent, DirtyMap, Disk};

/// A bitmap that clients of an export may ask for (`qemu:dirty-bitmap:NAME`).
#[derive(Clone)]
pub enum ExportBitmap {
    /// A persistent bitmap of the disk, as it is when a client asks.
    OfDisk(String),
    /// One that stays as it is.
    Fixed {
        /// Its name for clients.
        name: String,
        /// The changes that it records.
        dirty: Arc<DirtyMap>,
    },
}

impl ExportBitmap {
    /// Its name for clients.
    pub fn name(&self) -> &str {
        match self {
            Self::OfDisk(name) | Self::Fixed { name, .. } => name,
        }
    }

    /// Its record of `range`: extents that follow each other, `max` at least unless there are
    /// fewer.
    ///
    /// # Errors
    /// As [`DiskBitmaps::extents`](blockhouse_disk::DiskBitmaps::extents).
    pub(crate) async fn extents<S: Storage>(
        &self,
        disk: &Disk<S>,
        range: ByteRange,
        max: usize,
    ) -> Result<Vec<BitmapExtent>> {
        match self {
            Self::OfDisk(name) => disk.bitmaps().extents(name, range, max).await,
            Self::Fixed { dirty, .. } => Ok(extents_of(dirty, range, max)),
        }
    }
}

fn extents_of(dirty: &DirtyMap, range: ByteRange, max: usize) -> Vec<BitmapExtent> {
    let mut extents = Vec::new();
    let mut rest = range;
    while !rest.is_empty() && extents.len() < max {
        let run = dirty.next(rest.offset(), u64::MAX);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fixed_bitmap_is_told_in_extents_of_the_range() {
        let dirty = DirtyMap::new(100 << 10, 4096).expect("memory");
        dirty.mark(ByteRange::between(8192, 20000));
        dirty.mark(ByteRange::between(99 << 10, 100 << 10));
        let told = |start, end, max| {
            let extents = extents_of(&dirty, ByteRange::between(start, end), max);
            extents.iter().map(|one| (one.length, one.is_dirty)).collect::<Vec<_>>()
        };
        let all = [(8192, false), (12288, true), (77824, false), (4096, true)];
        assert_eq!(told(0, 100 << 10, 9), all);
        assert_eq!(told(0, 100 << 10, 2), all[..2]);
        assert_eq!(told(9000, 9100, 9), [(100, true)]);
        assert_eq!(told(20480, 98304, 9), [(77824, false)]);
        assert_eq!(told(0, 0, 9), []);
    }
}
