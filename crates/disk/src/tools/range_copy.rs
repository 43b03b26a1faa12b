//! Copies parts of a disk to another disk, repeatedly, while both may be in use.
//!
//! Guarantees: zeros of the source become zeros of the target without writing their bytes, and take
//! no space where the target had none. A copy takes no more memory than the part that it copies,
//! which the caller bounds. The caller does not copy overlapping ranges at the same time.

use std::ops::Range;
use std::sync::Arc;

use blockhouse_core::{
    Buffer, ByteRange, Durability, ExtentState, IoVector, Request, Result, Storage, WorkBudget,
};
use blockhouse_format::Intent;

use super::range_writer::RangeWriter;
use super::scan::StatusScan;
use super::zeros::{is_zero, runs};
use crate::dirty_map::DirtyMap;
use crate::disk::Disk;

/// Copies parts of one disk to the same offsets of another. See the module's documentation.
pub struct RangeCopy<S: Storage> {
    source: Arc<Disk<S>>,
    target: Arc<Disk<S>>,
    writer: RangeWriter<Arc<Disk<S>>, S>,
    /// The ranges in which the target may have non-zero bytes.
    written: DirtyMap,
}

impl<S: Storage> RangeCopy<S> {
    /// Copies to a target that is as long as the source, and reads as zeros if `is_zero`. The
    /// target's data ranges are recorded in units of `granularity` bytes.
    ///
    /// # Errors
    /// As [`DirtyMap::new`].
    pub fn new(
        source: Arc<Disk<S>>,
        target: Arc<Disk<S>>,
        granularity: u64,
        is_zero: bool,
    ) -> Result<Self> {
        let written = DirtyMap::new(source.size(), granularity)?;
        if !is_zero {
            written.mark(ByteRange::between(0, source.size()));
        }
        let writer = RangeWriter::new(Arc::clone(&target), false)?.unlimited();
        Ok(Self { source, target, writer, written })
    }

    /// Marks in `dirty` the ranges to be copied to make the target equal: those where the source
    /// has data or the target may have non-zero bytes. To be called while the source's changes are
    /// marked in `dirty`. The search for the source's data stops when `go_on` returns false.
    ///
    /// # Errors
    /// Errors of mapping.
    pub async fn mark_needed(&self, dirty: &DirtyMap, go_on: impl Fn() -> bool) -> Result<()> {
        let size = self.source.size();
        let mut scan = StatusScan::new([&*self.source], dirty.granularity(), size);
        while go_on() {
            let Some(chunk) = scan.next().await? else { break };
            chunk.data.iter().for_each(|data| {
                dirty.mark(*data);
            });
        }
        let mut rest = 0;
        while let Some(run) = self.written.next(rest, size) {
            dirty.mark(run);
            rest = run.end();
        }
        Ok(())
    }

    /// Marks in `dirty` the ranges that the source's image has itself, for a target that is its
    /// backing file. To be called while the source's changes are marked in `dirty`. `go_on` as in
    /// [`mark_needed`](Self::mark_needed).
    ///
    /// # Errors
    /// Errors of mapping.
    pub async fn mark_own(&self, dirty: &DirtyMap, go_on: impl Fn() -> bool) -> Result<()> {
        let budget = WorkBudget::new();
        let mut rest = ByteRange::between(0, self.source.size());
        while !rest.is_empty() && go_on() {
            let extent = self.source.format().map(rest, Intent::Read).await?;
            rest = rest.skip(extent.guest.length());
            if !matches!(extent.state, ExtentState::Hole | ExtentState::Backing) {
                dirty.mark(extent.guest);
            }
            budget.spend(WorkBudget::LOOK_UP).await;
        }
        Ok(())
    }

    /// Copies `range` from the source to the target. Not durable before the target is flushed.
    /// Returns the number of written bytes, without zeroed ranges.
    ///
    /// # Errors
    /// Errors of either storage; the message names it.
    pub async fn copy(&self, range: ByteRange) -> Result<u64> {
        self.copy_if(range, &|| true).await
    }

    /// As [`copy`](Self::copy). If `go_on` returns false after the read of the source, nothing is
    /// written.
    ///
    /// # Errors
    /// As [`copy`](Self::copy).
    pub async fn copy_if(&self, range: ByteRange, go_on: &dyn Fn() -> bool) -> Result<u64> {
        let mut buffer = Buffer::try_new(range.length() as usize)?;
        let (offset, into) = (range.offset(), buffer.lend());
        self.source.submit_unlimited(Request::Read { offset, into }).await?;
        if !go_on() {
            return Ok(0);
        }
        let bytes = buffer.bytes();
        let at = |part: &Range<usize>| {
            ByteRange::between(offset + part.start as u64, offset + part.end as u64)
        };
        let data = self.writer.data_of(offset, bytes);
        let holes = runs(bytes.len(), offset, self.writer.unit(), |part| {
            is_zero(&bytes[part.clone()]) && self.written.is_dirty(at(&part))
        });
        self.writer.make_holes(offset, holes).await?;
        // Marked before the write, because a failed write may have changed the target.
        data.iter().for_each(|part| {
            self.written.mark(at(part));
        });
        let sum = data.iter().map(|part| part.len() as u64).sum();
        self.writer.store(offset, data, &mut buffer).await?;
        Ok(sum)
    }

    /// Whether `range` reads the same in the target and in the source. Takes memory for both.
    ///
    /// # Errors
    /// Errors of either storage; the message names it.
    pub async fn is_copied(&self, range: ByteRange) -> Result<bool> {
        let mut parts = Vec::new();
        for disk in [&self.source, &self.target] {
            let mut buffer = Buffer::try_new(range.length() as usize)?;
            let (offset, into) = (range.offset(), buffer.lend());
            disk.submit_unlimited(Request::Read { offset, into }).await?;
            parts.push(buffer);
        }
        Ok(parts[0].bytes() == parts[1].bytes())
    }

    /// Forwards a write of the source to the target: `from`, at `offset`. Not durable before the
    /// target is flushed.
    ///
    /// # Errors
    /// Errors of the target.
    pub async fn store(&self, offset: u64, from: IoVector) -> Result<()> {
        let range = ByteRange::between(offset, offset + from.len() as u64);
        if from.is_zero() {
            return if self.written.is_dirty(range) {
                self.writer.make_holes(offset, std::iter::once(0..from.len())).await
            } else {
                Ok(())
            };
        }
        // Marked before the write, because a failed write may have changed the target.
        self.written.mark(range);
        let durability = Durability::None;
        self.target.submit_unlimited(Request::Write { offset, from, durability }).await
    }

    /// As [`copy`](Self::copy), for a range at the start of the disk, durable when it returns.
    ///
    /// # Errors
    /// As [`copy`](Self::copy). On error it is unknown whether the range was written.
    pub async fn copy_durably(&self, range: ByteRange) -> Result<()> {
        let mut buffer = Buffer::try_new(range.length() as usize)?;
        let offset = range.offset();
        self.source.submit_unlimited(Request::Read { offset, into: buffer.lend() }).await?;
        let (from, durability) = (buffer.lend(), Durability::Data);
        self.target.submit_unlimited(Request::Write { offset, from, durability }).await
    }
}
