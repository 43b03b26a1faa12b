//! Finds the parts of disks that have to be read, by a scan of their block status from the start to
//! the end.
//!
//! The scan is cut into chunks at multiples of one size, so that no two chunks touch the same
//! cluster of a copy. Long runs that read as zeros on all disks cost only the queries of block
//! status.

use std::ops::Deref;

use blockhouse_core::{ByteRange, Result, Storage};
use smallvec::SmallVec;

use crate::disk::Disk;
use crate::layer::{BlockStatus, BlockStatusCache};

/// A part of the disks, and the ranges in it where any disk may have data. There is at least one
/// such range.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    pub(super) range: ByteRange,
    /// In ascending order, inside `range`; they neither touch nor overlap.
    pub(super) data: SmallVec<[ByteRange; 4]>,
}

impl Chunk {
    /// The part of the chunk in `range`, which is inside the chunk.
    pub(super) fn part(&self, range: ByteRange) -> Self {
        let clip = |data: &ByteRange| {
            let (start, end) = (data.offset().max(range.offset()), data.end().min(range.end()));
            (start < end).then(|| ByteRange::between(start, end))
        };
        Self { range, data: self.data.iter().filter_map(clip).collect() }
    }
}

/// A scan of the first bytes of one or more disks; bytes past a disk's end read as zeros.
pub(super) struct StatusScan<D> {
    disks: SmallVec<[CachedStatus<D>; 2]>,
    size: u64,
    chunk_size: u64,
    offset: u64,
    /// Whether zeros count as data.
    is_dense: bool,
    /// Whether ranges whose status cannot be read count as data.
    forgives: bool,
}

/// A disk, and the run of equal block status that was queried last.
struct CachedStatus<D> {
    disk: D,
    /// The offset in the disk minus the offset of the scan, modulo 2^64.
    shift: u64,
    cache: BlockStatusCache,
    status: BlockStatus,
    /// The end of the run.
    end: u64,
}

/// The common status of all disks for a run.
#[derive(Clone, Debug)]
struct StatusRun {
    reads_as_zeros: bool,
    end: u64,
}

impl<S: Storage, D: Deref<Target = Disk<S>>> StatusScan<D> {
    /// A scan of `size` bytes in chunks of `chunk_size` bytes.
    pub(super) fn new(disks: impl IntoIterator<Item = D>, chunk_size: u64, size: u64) -> Self {
        let cache = BlockStatusCache::default;
        let cached = |disk| CachedStatus {
            disk,
            shift: 0,
            cache: cache(),
            status: BlockStatus::Hole,
            end: 0,
        };
        Self {
            disks: disks.into_iter().map(cached).collect(),
            size,
            chunk_size,
            offset: 0,
            is_dense: false,
            forgives: false,
        }
    }

    /// The scan begins at `offset`, and uses offsets higher by `shift`, modulo 2^64, for the first
    /// disk.
    pub(super) fn between(mut self, offset: u64, shift: u64) -> Self {
        self.offset = offset;
        if let Some(first) = self.disks.first_mut() {
            first.shift = shift;
        }
        self
    }

    /// Zeros count as data (`is_dense`), and so do ranges whose status cannot be read (`forgives`).
    pub(super) fn taking(mut self, is_dense: bool, forgives: bool) -> Self {
        (self.is_dense, self.forgives) = (is_dense, forgives);
        self
    }

    /// The offset that the scan has reached.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// The next chunk with data; `None` after the last.
    pub(super) async fn next(&mut self) -> Result<Option<Chunk>> {
        while self.offset < self.size {
            let start = self.offset;
            let chunk_end = self.end_of_chunk(start);
            let run = self.query().await?;
            if run.reads_as_zeros && run.end >= chunk_end {
                self.offset = match run.end {
                    end if end >= self.size => self.size,
                    end => end - end % self.chunk_size,
                };
                continue;
            }
            let mut data = SmallVec::new();
            while self.offset < chunk_end {
                let run = self.query().await?;
                let end = run.end.min(chunk_end);
                if !run.reads_as_zeros {
                    add(&mut data, ByteRange::between(self.offset, end));
                }
                self.offset = end;
            }
            if !data.is_empty() {
                return Ok(Some(Chunk { range: ByteRange::between(start, chunk_end), data }));
            }
        }
        Ok(None)
    }

    fn end_of_chunk(&self, offset: u64) -> u64 {
        (offset + self.chunk_size - offset % self.chunk_size).min(self.size)
    }

    /// The status at the scan's offset.
    async fn query(&mut self) -> Result<StatusRun> {
        let mut all = StatusRun { reads_as_zeros: !self.is_dense, end: self.size };
        if self.is_dense {
            return Ok(all);
        }
        let chunk_end = self.end_of_chunk(self.offset);
        for cached in &mut self.disks {
            let offset = self.offset.wrapping_add(cached.shift);
            let rest = ByteRange::between(offset, cached.disk.size().max(offset));
            if rest.is_empty() {
                continue;
            }
            if cached.end <= self.offset {
                (cached.status, cached.end) =
                    match cached.disk.block_status(rest, &mut cached.cache).await {
                        Err(_) if self.forgives => (BlockStatus::Data, chunk_end),
                        asked => asked.map(|(status, length)| (status, self.offset + length))?,
                    };
            }
            all.reads_as_zeros &= cached.status != BlockStatus::Data;
            all.end = all.end.min(cached.end);
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
