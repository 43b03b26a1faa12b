//! Copies ranges from the backing file into the image.
//!
//! Guarantees: the content of the disk never changes. The backing file is read without a claim to
//! changes, so no change waits for the read. The write has an exclusive claim on whole clusters, so
//! a change of the same clusters happens before or after the write. The write covers only ranges
//! that the image still leaves to its backing file, and the other subclusters of the same clusters.
//! Zeros take no space if the format has a flag for zeros, and bitmaps record no change. As for
//! every write, data is linked after it is written, so after a crash a cluster is either unchanged
//! or filled.

use blockhouse_core::{
    Buffer, ByteRange, ExtentState, Fallback, IoVector, Result, Storage, Unmap, WorkBudget,
};
use blockhouse_format::Intent;

use super::{Writer, ZeroOptions};
use crate::buffers::MAX_POPULATED;
use crate::claims::Claim;
use crate::durability::RequestSync;
use crate::layer::{BlockStatus, BlockStatusCache, Reader};

/// Maximum number of bytes that one fill with zeros covers.
const MAX_ZEROS: u64 = 16 << 20;

/// Whole clusters that the image leaves to its backing file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackedRange {
    /// The range, at most as long as one fill may be.
    pub range: ByteRange,
    /// Whether the backing file reads as zeros there.
    pub is_zero: bool,
}

impl<S: Storage> Writer<S> {
    /// The first part of `range` that the image leaves to its backing file. With `base`, only data
    /// in the first `base` layers of the chain counts; this layer is the first. `cache` is for
    /// lookups of this disk, and may be old, because the chain's content never changes.
    pub(crate) async fn next_backed(
        &self,
        range: ByteRange,
        base: Option<usize>,
        cache: &mut BlockStatusCache,
    ) -> Result<Option<BackedRange>> {
        let found = match base {
            Some(base) => self.find_above(range, base).await?,
            None => self.find_backed(range).await?,
        };
        let Some(found) = found else { return Ok(None) };
        let (status, length) = self.layer.status().below(found, cache).await?;
        let unit = self.populate_unit();
        let zeros = found.truncate(length.min(MAX_ZEROS));
        if status != BlockStatus::Data
            && let Some(range) = self.clusters_inside(zeros)
        {
            return Ok(Some(BackedRange { range, is_zero: true }));
        }
        let first = found.truncate(MAX_POPULATED.max(unit) - found.offset() % unit);
        let range = self.clusters_of(first);
        Ok(Some(BackedRange { range, is_zero: false }))
    }

    /// The first bytes of `range` that the image leaves to its backing file, up to the end of that
    /// file.
    pub(super) async fn find_backed(&self, range: ByteRange) -> Result<Option<ByteRange>> {
        let budget = WorkBudget::new();
        let size = self.layer.backing_layer().map_or(0, |backing| backing.size());
        let mut rest = range.truncate(size.saturating_sub(range.offset()));
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

    /// As [`find_backed`](Self::find_backed), only for data in the first `base` layers of the
    /// chain.
    async fn find_above(&self, range: ByteRange, base: usize) -> Result<Option<ByteRange>> {
        let budget = WorkBudget::new();
        let mut rest = range;
        while let Some(found) = self.find_backed(rest).await? {
            let (place, length) = self.layer.status().allocation_depth(found).await?;
            // The depth of this layer is 1.
            if (1..=base).contains(&(place as usize)) {
                return Ok(Some(found.truncate(length)));
            }
            rest = range.after(found.truncate(length).end());
            budget.spend(WorkBudget::LOOK_UP).await;
        }
        Ok(None)
    }

    /// The unit of populating in bytes: a cluster, or the layer's block if that is larger.
    pub(super) fn populate_unit(&self) -> u64 {
        self.layer.format().cluster_size().unwrap_or(1).max(self.layer.block_size())
    }

    /// The clusters that `range` touches, cut at the end of the disk.
    pub(super) fn clusters_of(&self, range: ByteRange) -> ByteRange {
        let clusters = range.align_outward(self.populate_unit());
        clusters.before(self.layer.format().end())
    }

    /// The whole clusters at the start of `range`; `None` if it begins inside a cluster.
    fn clusters_inside(&self, range: ByteRange) -> Option<ByteRange> {
        let inside = range.align_inward(self.populate_unit())?;
        (inside.offset() == range.offset()).then_some(inside)
    }

    /// Populates the clusters of `part` of which the image leaves any bytes to its backing file.
    /// Returns the number of bytes, which the next flush makes durable. Calls `begin_change` after
    /// the read of the backing file, and holds the returned guard during the write. If no guard is
    /// returned, nothing is changed, and the result is `None`.
    pub(crate) async fn populate<G>(
        &self,
        part: BackedRange,
        begin_change: &dyn Fn() -> Option<G>,
    ) -> Result<Option<u64>> {
        let claim = || self.layer.claims().changes().claim_exclusive(part.range);
        if part.is_zero {
            let claim = claim().await;
            let Some(_guard) = begin_change() else { return Ok(None) };
            return self.populate_zeros(part.range, &claim).await.map(Some);
        }
        let fetch = self.layer.claims().fetches().claim_exclusive(part.range).await;
        if self.find_backed(part.range).await?.is_none() {
            return Ok(Some(0));
        }
        let length = part.range.length() as usize;
        let mut buffer = self.layer.cluster_buffers().for_populating(length).await?;
        self.layer.read_aligned(part.range, fetch.attach_to(buffer.lend()), Reader::Read).await?;
        let claim = claim().await;
        let Some(_guard) = begin_change() else { return Ok(None) };
        self.store_backed(part.range, &mut buffer, &claim).await.map(Some)
    }

    /// As [`populate`](Self::populate), for zeros of the backing file.
    async fn populate_zeros(&self, range: ByteRange, claim: &Claim<'_>) -> Result<u64> {
        let (mut rest, mut filled) = (range, 0);
        // Fills only backed ranges, because a guest may have written the rest of a cluster
        // meanwhile.
        while let Some(found) = self.find_backed(rest).await? {
            self.fill(found, None, claim).await?;
            filled += found.length();
            rest = rest.after(found.end());
        }
        Ok(filled)
    }

    /// Stores the clusters of `range` that the image leaves to its backing file. Returns the number
    /// of bytes. `bytes` has the content of `range`. This content may have been read before `claim`
    /// was acquired, because the backing file never changes.
    pub(super) async fn store_backed(
        &self,
        range: ByteRange,
        bytes: &mut Buffer,
        claim: &Claim<'_>,
    ) -> Result<u64> {
        let (mut rest, mut filled) = (range, 0);
        while let Some(found) = self.find_backed(rest).await? {
            let clusters = self.clusters_of(found);
            let run = clusters.before(rest.end());
            // Subclusters that the image has may have changed since `bytes` was read, so they are
            // read again.
            let start = (run.offset() - range.offset()) as usize;
            self.layer.read_own(run, bytes.lend_range(start, run.length() as usize)).await?;
            self.store_run(run, range.offset(), bytes, claim).await?;
            filled += run.length();
            rest = rest.after(run.end());
        }
        Ok(filled)
    }

    /// Writes clusters: data, or zeros for clusters that are all zeros. `bytes` begins with the
    /// byte at `start`.
    async fn store_run(
        &self,
        run: ByteRange,
        start: u64,
        bytes: &mut Buffer,
        claim: &Claim<'_>,
    ) -> Result<()> {
        let unit = self.populate_unit();
        let place = |part: ByteRange| {
            let first = (part.offset() - start) as usize;
            first..first + part.length() as usize
        };
        let is_zero = |part: ByteRange| bytes.bytes()[place(part)].iter().all(|byte| *byte == 0);
        let mut parts: Vec<(ByteRange, bool)> = Vec::new();
        let mut rest = run;
        while !rest.is_empty() {
            let part = rest.truncate(unit);
            match (is_zero(part), parts.last_mut()) {
                (kind, Some((last, of))) if kind == *of => {
                    *last = ByteRange::between(last.offset(), part.end());
                }
                (kind, _) => parts.push((part, kind)),
            }
            rest = rest.skip(part.length());
        }
        for (part, is_zero) in parts {
            let from = bytes.lend_range(place(part).start, part.length() as usize);
            self.fill(part, (!is_zero).then_some(from), claim).await?;
        }
        Ok(())
    }

    /// Writes `from`, or zeros for `None`, to a range that `claim` covers.
    async fn fill(
        &self,
        range: ByteRange,
        from: Option<IoVector>,
        claim: &Claim<'_>,
    ) -> Result<()> {
        let sync = RequestSync::of_same_content(self.layer.format());
        match from {
            Some(from) => self.write_aligned(range, claim.attach_to(from), &sync).await,
            None => {
                let how = ZeroOptions {
                    unmap: Unmap::Allowed,
                    fallback: Fallback::Allowed,
                    writes_small: false,
                };
                self.write_zeroes(range, how, &sync, claim).await
            }
        }
    }
}
