//! What an image leaves to its backing file becomes its own.
//!
//! Guarantees: the content of the disk does not change, at any moment. A change of the same clusters comes before or after,
//! never between the read of the backing file and the write to the image: the claim is exclusive, and covers whole clusters.
//! What the image has already is not written again, but for the rest of a cluster some subclusters of which it has. Zeros take
//! no space where the format has a flag for them. Data is linked after it is written, as every write's, so a crash leaves a
//! cluster as it was, or filled.

use std::ops::Range;

use blockhouse_core::{
    Buffer, ByteRange, ExtentState, Fallback, IoVector, Result, Storage, Unmap, WorkBudget,
};
use blockhouse_format::Intent;

use super::{Writer, ZeroOptions};
use crate::claims::Claim;
use crate::durability::RequestSync;
use crate::layer::{BlockStatus, BlockStatusCache};

/// Bytes of data that are read and written at once, where clusters are not larger.
const MAX_DATA: u64 = 1 << 20;
/// Bytes of zeros that are written at once.
const MAX_ZEROS: u64 = 16 << 20;

/// A part of an image that it leaves to its backing file: whole clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackedRange {
    /// Where it is, at most what is filled at once.
    pub range: ByteRange,
    /// Whether the backing file has zeros there.
    pub is_zero: bool,
}

impl<S: Storage> Writer<S> {
    /// The first part of `range` that the image leaves to its backing file, as far as that reaches. `cache` is that of
    /// questions about this disk, and may be old: what is behind the image never changes.
    pub(crate) async fn next_backed(
        &self,
        range: ByteRange,
        cache: &mut BlockStatusCache,
    ) -> Result<Option<BackedRange>> {
        let Some(found) = self.find_backed(range).await? else { return Ok(None) };
        let (status, length) = self.layer.backing_status(found, cache).await?;
        let unit = self.populate_unit();
        let zeros = found.truncate(length.min(MAX_ZEROS));
        if status != BlockStatus::Data
            && let Some(range) = self.clusters_inside(zeros)
        {
            return Ok(Some(BackedRange { range, is_zero: true }));
        }
        let first = found.truncate(MAX_DATA.max(unit) - found.offset() % unit);
        let range = self.clusters_of(first);
        Ok(Some(BackedRange { range, is_zero: false }))
    }

    /// The first bytes of `range` that the image leaves to its backing file, before that ends.
    async fn find_backed(&self, range: ByteRange) -> Result<Option<ByteRange>> {
        let budget = WorkBudget::new();
        let mut rest = range.truncate(self.layer.backing_size().saturating_sub(range.offset()));
        while !rest.is_empty() {
            let extent = self.layer.format().map(rest, Intent::Read).await?;
            if extent.state == ExtentState::Backing {
                return Ok(Some(extent.guest));
            }
            rest = rest.skip(extent.guest.length());
            budget.spend(WorkBudget::LOOK_UP).await;
        }
        Ok(None)
    }

    /// Bytes that are filled as a whole.
    fn populate_unit(&self) -> u64 {
        self.layer.format().cluster_size().unwrap_or(1).max(self.layer.block_size())
    }

    /// The clusters that `range` touches, as far as the disk has them.
    fn clusters_of(&self, range: ByteRange) -> ByteRange {
        let clusters = range.align_outward(self.populate_unit());
        ByteRange::between(clusters.offset(), clusters.end().min(self.layer.format().end()))
    }

    /// Those of them from the start of `range` on that lie inside it; `None` where it begins in the middle of one.
    fn clusters_inside(&self, range: ByteRange) -> Option<ByteRange> {
        let inside = range.align_inward(self.populate_unit())?;
        (inside.offset() == range.offset()).then_some(inside)
    }

    /// Makes whole clusters the image's own, where it leaves anything of them to its backing file; how many bytes. Not
    /// durable before the next flush. Memory for all of them is taken at once. Where `go_on` is false after the backing file
    /// was read, nothing more is written.
    pub(crate) async fn populate(
        &self,
        part: BackedRange,
        go_on: &dyn Fn() -> bool,
    ) -> Result<u64> {
        let claim = self.layer.claims().claim_exclusive(part.range).await;
        let (mut rest, mut filled) = (part.range, 0);
        while let Some(found) = self.find_backed(rest).await? {
            let run = match part.is_zero {
                // Not the rest of its cluster, which a guest may have written since.
                true => found,
                false => {
                    let clusters = self.clusters_of(found);
                    clusters.truncate(rest.end() - clusters.offset())
                }
            };
            if !go_on() {
                break;
            }
            match part.is_zero {
                true => self.fill(run, None, &claim).await?,
                false => self.populate_run(run, &claim, go_on).await?,
            }
            filled += run.length();
            rest = ByteRange::between(run.end(), rest.end());
        }
        Ok(filled)
    }

    /// Reads clusters as the guest would, and writes them: those with data, and those that are zeros.
    async fn populate_run(
        &self,
        run: ByteRange,
        claim: &Claim<'_>,
        go_on: &dyn Fn() -> bool,
    ) -> Result<()> {
        let mut buffer = Buffer::try_new(run.length() as usize)?;
        self.layer.read_aligned(run, claim.attach_to(buffer.lend())).await?;
        if !go_on() {
            return Ok(());
        }
        let unit = self.populate_unit() as usize;
        let is_zero =
            |part: &Range<usize>| buffer.bytes()[part.clone()].iter().all(|byte| *byte == 0);
        let mut parts: Vec<(Range<usize>, bool)> = Vec::new();
        for start in (0..buffer.len()).step_by(unit) {
            let part = start..(start + unit).min(buffer.len());
            match (is_zero(&part), parts.last_mut()) {
                (kind, Some((last, of))) if kind == *of => last.end = part.end,
                (kind, _) => parts.push((part, kind)),
            }
        }
        for (part, is_zero) in parts {
            let (start, end) = (part.start as u64, part.end as u64);
            let range = ByteRange::between(run.offset() + start, run.offset() + end);
            let from = buffer.lend_range(part.start, part.len());
            self.fill(range, (!is_zero).then_some(from), claim).await?;
        }
        Ok(())
    }

    /// Writes bytes to whole clusters that `claim` covers; zeros where there are none.
    async fn fill(
        &self,
        range: ByteRange,
        from: Option<IoVector>,
        claim: &Claim<'_>,
    ) -> Result<()> {
        let sync = RequestSync::not_required(self.layer.format());
        match from {
            Some(from) => self.write_aligned(range, claim.attach_to(from), &sync).await,
            None => {
                let how = ZeroOptions { unmap: Unmap::Allowed, fallback: Fallback::Allowed };
                self.write_zeroes(range, how, &sync, claim).await
            }
        }
    }
}
