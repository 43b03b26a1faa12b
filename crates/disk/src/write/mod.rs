//! Changes of one image: writes, zero writes, discards, compressed writes.
//!
//! 1. The caller has checked the request and holds a claim to its range ([`Writer::claim`]).
//! 2. The format prepares an extent for the first part of the range ([`PreparedExtent`]).
//! 3. The durability of the write is decided ([`RequestSync`]): for all extents together if all are
//!    known, else for each part.
//! 4. The data is written, together with the padding of copy on write (`cow`); unaligned data is
//!    copied through an aligned buffer (`unaligned`).
//! 5. The extent is linked, or freed if the write failed or its future was dropped.
//!
//! A request of several extents has several extents in flight (see [`crate::parts`]). A request
//! waits for all its operations, also if one fails, because after the answer no operation may touch
//! the disk or the request's memory.

mod compressed;
mod copy_on_read;
mod cow;
mod populate;
mod prepare_zeroes;
mod prepared_extent;
#[cfg(test)]
mod tests;
mod unaligned;
mod zero;

use std::cell::Cell;
use std::ops::Deref;
use std::sync::Arc;

use blockhouse_core::sync::run_bounded;
use blockhouse_core::{
    ByteRange, Extent, ExtentFlags, ExtentState, IoVector, Result, Storage, WorkBudget, rare,
};
use blockhouse_format::{DataPlace, Intent};
use futures_util::stream::{self, StreamExt};

use crate::claims::Claim;
use crate::durability::{DurabilityPlan, RequestSync, Writes};
use crate::layer::Layer;
use crate::parts::{MAX_IN_FLIGHT, MAX_PART, first_part, take_part};
use prepared_extent::PreparedExtent;

pub use compressed::CompressResult;
pub use populate::BackedRange;
pub(crate) use zero::ZeroOptions;

/// Changes the image of a layer. See the module's page.
pub(crate) struct Writer<S: Storage> {
    layer: Arc<Layer<S>>,
}

impl<S: Storage> Writer<S> {
    pub(crate) fn new(layer: Arc<Layer<S>>) -> Self {
        Self { layer }
    }

    pub(crate) fn layer(&self) -> &Arc<Layer<S>> {
        &self.layer
    }

    pub(crate) fn into_layer(self) -> Arc<Layer<S>> {
        self.layer
    }

    /// A claim to write to `range`: exclusive if blocks are changed in part, else shared.
    pub(crate) async fn claim(&self, range: ByteRange) -> Claim<'_> {
        if !self.layer.claims().is_needed() {
            return Claim::Untracked;
        }
        loop {
            let blocks = self.layer.blocks_of(range);
            let claim = if blocks == range {
                self.layer.claims().changes().claim_shared(range).await
            } else {
                self.layer.claims().changes().claim_exclusive(blocks).await
            };
            // The disk may have grown meanwhile, and its last block with it.
            if self.layer.blocks_of(range) == blocks {
                return claim;
            }
        }
    }

    /// Stores `from` in `range`; the completion of `sync` makes the data durable. `claim` is the
    /// [`claim`](Self::claim) to the range.
    pub(crate) async fn write(
        &self,
        range: ByteRange,
        from: IoVector,
        sync: &RequestSync<'_, S>,
        claim: &Claim<'_>,
    ) -> Result<()> {
        if self.layer.alignment().admits(range.offset(), &from) {
            return self.write_aligned(range, from, sync).await;
        }
        // Boxed, so that the future of the common path stays small.
        rare(self.write_unaligned(range, from, sync, claim)).await
    }

    /// As [`write`](Self::write), for whole blocks in memory with the storage's alignment.
    async fn write_aligned(
        &self,
        range: ByteRange,
        from: IoVector,
        sync: &RequestSync<'_, S>,
    ) -> Result<()> {
        let first = self.prepare_for(sync, first_part(range), Intent::Write).await?;
        if first.guest == range {
            let plan = sync.plan_data([&*first].into_iter(), Writes::Counted(1));
            return self.write_extent(first, from, plan).await;
        }
        rare(self.write_parts(first, range, from, sync)).await
    }

    /// Writes a range of several extents, the first of which is prepared.
    async fn write_parts(
        &self,
        first: PreparedExtent<'_, S>,
        range: ByteRange,
        from: IoVector,
        sync: &RequestSync<'_, S>,
    ) -> Result<()> {
        let mut rest = range.skip(first.guest.length());
        let mut known = vec![first];
        // The extents that this loop does not prepare are prepared one by one later.
        while sync.changes_content() && !rest.is_empty() && known.len() < MAX_IN_FLIGHT {
            let Some(extent) = self.layer.format().map_next(first_part(rest)).await? else { break };
            let extent = self.prepared(extent);
            rest = rest.skip(extent.guest.length());
            known.push(extent);
        }
        self.write_extents(known, rest, from, sync).await
    }

    /// Writes to prepared extents and to `rest`, which follows them.
    async fn write_extents(
        &self,
        known: Vec<PreparedExtent<'_, S>>,
        rest: ByteRange,
        mut from: IoVector,
        sync: &RequestSync<'_, S>,
    ) -> Result<()> {
        let is_all_known = rest.is_empty() && from.len() as u64 <= MAX_PART;
        let common_plan = is_all_known
            .then(|| sync.plan_data(known.iter().map(Deref::deref), Writes::Counted(known.len())));
        let stopped = Cell::new(false);
        let others = stream::unfold(rest, |rest| {
            let is_over = rest.is_empty() || stopped.get();
            async move {
                if is_over {
                    return None;
                }
                let extent = self.prepare_for(sync, first_part(rest), Intent::Write).await;
                let length = extent.as_ref().map_or(rest.length(), |one| one.guest.length());
                Some((extent, rest.skip(length)))
            }
        });
        let budget = &WorkBudget::new();
        let parts = stream::iter(known).map(Ok).chain(others).map(|extent: Result<_>| {
            let part = extent.map(|extent| {
                let part = take_part(&mut from, &extent);
                (extent, part)
            });
            async move {
                let (extent, from) = part?;
                let plan = common_plan
                    .unwrap_or_else(|| sync.plan_data([&*extent].into_iter(), Writes::Unbounded));
                budget.charge(WorkBudget::LOOK_UP);
                self.write_extent(extent, from, plan).await
            }
        });
        run_bounded(MAX_IN_FLIGHT, budget, &stopped, parts).await
    }

    async fn write_extent(
        &self,
        extent: PreparedExtent<'_, S>,
        from: IoVector,
        plan: DurabilityPlan,
    ) -> Result<()> {
        let ExtentState::Mapped { host } = extent.state else {
            return Err(self.layer.misplaced(&extent));
        };
        let reads_as_zeros =
            extent.flags.contains(ExtentFlags::ZEROED) && !self.layer.is_encrypted();
        let is_prepared = extent.flags.contains(ExtentFlags::PREPARED);
        let can_leave_rest = reads_as_zeros && (is_prepared || plan.may_leave_holes());
        if extent.alloc_range != extent.guest && !can_leave_rest {
            return rare(self.write_with_cow(extent, host, from, plan)).await;
        }
        let place = DataPlace { guest: extent.guest.offset(), host };
        self.store(extent, place, from, plan).await
    }

    /// Writes `from` to the space of a prepared extent, from `place` on, and links the extent.
    async fn store(
        &self,
        mut extent: PreparedExtent<'_, S>,
        place: DataPlace,
        from: IoVector,
        plan: DurabilityPlan,
    ) -> Result<()> {
        let durability = plan.write_durability();
        let data_write = if plan.joins_writeback(&extent) {
            self.layer.format().begin_data_write()
        } else {
            None
        };
        extent.begin_io();
        let outcome = self.layer.write_data(place, from, durability).await;
        // The guard is dropped before the link, because the link may wait for a writeback, which
        // waits for this guard. If a writeback begins on another loop's thread before the link,
        // another writeback follows.
        drop(data_write);
        extent.complete(outcome, durability).await
    }

    /// Prepares the first bytes of `range` for a change of the request that `sync` belongs to.
    async fn prepare_for(
        &self,
        sync: &RequestSync<'_, S>,
        range: ByteRange,
        intent: Intent,
    ) -> Result<PreparedExtent<'_, S>> {
        if sync.changes_content() {
            self.prepare(range, intent).await
        } else {
            Ok(self.prepared(self.layer.format().map_same_content(range, intent).await?))
        }
    }

    /// Prepares the first bytes of `range` for a change.
    async fn prepare(&self, range: ByteRange, intent: Intent) -> Result<PreparedExtent<'_, S>> {
        Ok(self.prepared(self.layer.format().map(range, intent).await?))
    }

    fn prepared(&self, extent: Extent) -> PreparedExtent<'_, S> {
        self.layer.invalidate(extent.alloc_range);
        PreparedExtent::new(self.layer.format(), extent)
    }
}
