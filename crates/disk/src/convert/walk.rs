//! Which parts of disks have to be read at all: a walk over their maps, from the start to the end.
//!
//! Cut into pieces at multiples of one size, so that no two of them touch the same cluster of a copy.
//! Long stretches that all disks read as zeros are passed over at the pace of their maps.

use std::ops::Deref;

use blockhouse_core::{ByteRange, Result, Storage};
use smallvec::SmallVec;

use crate::{BlockStatus, BlockStatusCache, Disk};

/// A part of the disks and where in it any of them may have data. At least somewhere it has.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) range: ByteRange,
    /// In ascending order, inside `range`; they neither touch nor overlap.
    pub(crate) data: SmallVec<[ByteRange; 4]>,
}

impl Piece {
    /// What of the piece lies in `range`, a part of it.
    pub(crate) fn part(&self, range: ByteRange) -> Self {
        let clip = |data: &ByteRange| {
            let (start, end) = (data.offset().max(range.offset()), data.end().min(range.end()));
            (start < end).then(|| ByteRange::between(start, end))
        };
        Self { range, data: self.data.iter().filter_map(clip).collect() }
    }
}

/// A walk over the first bytes of one or more disks; what a disk does not have reads as zeros.
pub(crate) struct Walk<D> {
    disks: SmallVec<[Known<D>; 2]>,
    size: u64,
    piece: u64,
    offset: u64,
}

/// A disk and the stretch of it that was asked for last.
struct Known<D> {
    disk: D,
    cache: BlockStatusCache,
    status: BlockStatus,
    /// Where the stretch ends.
    end: u64,
}

/// What all disks say of a stretch.
#[derive(Clone, Debug)]
struct Stretch {
    reads_as_zeros: bool,
    end: u64,
}

impl<S: Storage, D: Deref<Target = Disk<S>>> Walk<D> {
    /// A walk over `size` bytes in pieces of `piece` bytes.
    pub(crate) fn new(disks: impl IntoIterator<Item = D>, piece: u64, size: u64) -> Self {
        let cache = BlockStatusCache::default;
        let known = |disk| Known { disk, cache: cache(), status: BlockStatus::Hole, end: 0 };
        Self { disks: disks.into_iter().map(known).collect(), size, piece, offset: 0 }
    }

    /// How far the walk has come.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// The next piece with data; `None` behind the last.
    pub(crate) async fn next(&mut self) -> Result<Option<Piece>> {
        while self.offset < self.size {
            let start = self.offset;
            let piece_end = self.end_of_piece(start);
            let stretch = self.look().await?;
            if stretch.reads_as_zeros && stretch.end >= piece_end {
                self.offset = match stretch.end {
                    end if end >= self.size => self.size,
                    end => end - end % self.piece,
                };
                continue;
            }
            let mut data = SmallVec::new();
            while self.offset < piece_end {
                let stretch = self.look().await?;
                let end = stretch.end.min(piece_end);
                if !stretch.reads_as_zeros {
                    add(&mut data, ByteRange::between(self.offset, end));
                }
                self.offset = end;
            }
            if !data.is_empty() {
                return Ok(Some(Piece { range: ByteRange::between(start, piece_end), data }));
            }
        }
        Ok(None)
    }

    fn end_of_piece(&self, offset: u64) -> u64 {
        (offset + self.piece - offset % self.piece).min(self.size)
    }

    /// What is at the place that the walk has come to.
    async fn look(&mut self) -> Result<Stretch> {
        let mut all = Stretch { reads_as_zeros: true, end: self.size };
        for known in &mut self.disks {
            let rest = ByteRange::between(self.offset, known.disk.size().max(self.offset));
            if rest.is_empty() {
                continue;
            }
            if known.end <= self.offset {
                let (status, length) = known.disk.block_status(rest, &mut known.cache).await?;
                (known.status, known.end) = (status, self.offset + length);
            }
            all.reads_as_zeros &= known.status != BlockStatus::Data;
            all.end = all.end.min(known.end);
        }
        Ok(all)
    }
}

fn add(data: &mut SmallVec<[ByteRange; 4]>, next: ByteRange) {
    match data.last_mut() {
        Some(last) if last.end() == next.offset() => {
            *last = ByteRange::between(last.offset(), next.end());
        }
        _ => data.push(next),
    }
}
