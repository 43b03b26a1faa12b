//! The way of a request: mapped extent by extent, each moved as its state says, made durable once.
//!
//! Everything here is aligned (see [`crate::bounce`] for the rest) and inside the disk. One extent is
//! one storage operation and nothing else; several go down together, a few at a time, and the next ones
//! are looked up as those complete. So a request of any length holds at most 2 x [`TOGETHER`] extents of
//! at most [`MAX_PART`] bytes each. Between them it yields, see [`WorkBudget`]: what needs no
//! waiting (holes, look-ups, decompression) keeps no other task of the thread waiting.
//!
//! The durability of a write is decided before its data is written ([`RequestSync`]): for all extents
//! together where all are known, else for each part. Each prepared extent is linked as soon as its data
//! is written. All operations of a request are waited for, also when one
//! fails, since a request that was answered must not touch the disk or its memory any more.

use std::cell::Cell;
use std::ops::Deref;

use blockhouse_core::sync::run_bounded;
use blockhouse_core::{
    ByteRange, Error, ErrorKind, Extent, ExtentFlags, ExtentState, IoVector, Result, Storage,
    WorkBudget,
};
use blockhouse_format::Intent;
use futures_util::stream::{self, Stream, StreamExt};

use crate::Disk;
use crate::durability::{DurabilityPlan, FlushTracker, RequestSync, Writes};
use crate::prepared::Prepared;

/// How many operations of one request are in flight together, and how many extents of a write are
/// prepared before the first one goes down.
const TOGETHER: usize = 16;
/// The most bytes of one storage operation. More is no faster on any device, and takes a kernel that
/// copies from its page cache inside of the system call too long.
const MAX_PART: u64 = 4 << 20;
/// Where longer requests are cut: no cluster of any format lies on both sides.
const CUT_ALIGNMENT: u64 = 2 << 20;

impl<S: Storage> Disk<S> {
    /// Fills `into` with the bytes of `range`.
    pub(crate) async fn read(&self, range: ByteRange, into: IoVector) -> Result<()> {
        // What is read keeps its place until it is read.
        let _guard = self.format.begin_read();
        let first = self.format.map(first_part(range), Intent::Read).await?;
        if first.guest == range {
            return self.read_extent(&first, into).await;
        }
        // Boxed, so that the future of the common way stays small.
        Box::pin(self.read_parts(first, range, into)).await
    }

    /// Stores `from` in `range`, as durable as `sync` says once it is completed.
    pub(crate) async fn write(
        &self,
        range: ByteRange,
        from: IoVector,
        sync: &RequestSync<'_, S>,
    ) -> Result<()> {
        let first = self.prepare(first_part(range), Intent::Write).await?;
        if first.guest == range {
            let plan = sync.plan_data([&*first].into_iter(), Writes::Counted(1));
            return self.write_extent(first, from, plan).await;
        }
        Box::pin(self.write_parts(first, range, from, sync)).await
    }

    /// Tells the storage that `range` will be read.
    pub(crate) async fn prefetch(&self, range: ByteRange) -> Result<()> {
        let budget = WorkBudget::new();
        let mut rest = range;
        while !rest.is_empty() {
            let extent = self.format.map(rest, Intent::Read).await?;
            rest = rest.skip(extent.guest.length());
            if let ExtentState::Mapped { host } = extent.state {
                let host = ByteRange::between(host, host + extent.guest.length());
                self.storage().prefetch(host).await?;
            }
            budget.spend(WorkBudget::LOOK_UP).await;
        }
        Ok(())
    }

    /// Reads a range of several extents, the first of which is known.
    async fn read_parts(&self, first: Extent, range: ByteRange, into: IoVector) -> Result<()> {
        let stopped = Cell::new(false);
        let extents = stream::unfold((Some(first), range), |(known, rest)| {
            let is_over = rest.is_empty() || stopped.get();
            async move {
                let extent = match known {
                    _ if is_over => return None,
                    Some(extent) => Ok(extent),
                    None => self.format.map(first_part(rest), Intent::Read).await,
                };
                let length = extent.as_ref().map_or(rest.length(), |one| one.guest.length());
                Some((extent, (None, rest.skip(length))))
            }
        });
        self.read_extents(extents, into, &stopped).await
    }

    async fn read_extents(
        &self,
        extents: impl Stream<Item = Result<Extent>>,
        mut into: IoVector,
        stopped: &Cell<bool>,
    ) -> Result<()> {
        let budget = &WorkBudget::new();
        let parts = extents.map(|extent| {
            let part = extent.map(|extent| (extent, take(&mut into, &extent)));
            async move {
                let (extent, into) = part?;
                let outcome = self.read_extent(&extent, into).await;
                budget.charge(cost_of_reading(&extent));
                outcome
            }
        });
        run_bounded(TOGETHER, budget, stopped, parts).await
    }

    async fn read_extent(&self, extent: &Extent, mut into: IoVector) -> Result<()> {
        match extent.state {
            ExtentState::Mapped { host } => self.read_place(host, into).await,
            ExtentState::Zero | ExtentState::Hole if into.len() as u64 > WorkBudget::QUANTUM => {
                Box::pin(fill_with_zeros(into)).await
            }
            ExtentState::Zero | ExtentState::Hole => {
                into.fill(0);
                into.check_intact()
            }
            ExtentState::Compressed { host, length } => {
                Box::pin(self.read_compressed(extent, host, length, into)).await
            }
            ExtentState::Backing => self.read_behind(extent.guest, into).await,
        }
    }

    /// Writes a range of several extents, the first of which is prepared.
    async fn write_parts(
        &self,
        first: Prepared<'_, S>,
        range: ByteRange,
        from: IoVector,
        sync: &RequestSync<'_, S>,
    ) -> Result<()> {
        let mut rest = range.skip(first.guest.length());
        let mut known = vec![first];
        while !rest.is_empty() && known.len() < TOGETHER {
            let extent = self.prepare(first_part(rest), Intent::Write).await?;
            rest = rest.skip(extent.guest.length());
            known.push(extent);
        }
        self.write_extents(known, rest, from, sync).await
    }

    /// Writes to prepared extents and to `rest`, which follows them.
    async fn write_extents(
        &self,
        known: Vec<Prepared<'_, S>>,
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
                let extent = self.prepare(first_part(rest), Intent::Write).await;
                let length = extent.as_ref().map_or(rest.length(), |one| one.guest.length());
                Some((extent, rest.skip(length)))
            }
        });
        let budget = &WorkBudget::new();
        let parts = stream::iter(known).map(Ok).chain(others).map(|extent: Result<_>| {
            let part = extent.map(|extent| {
                let part = take(&mut from, &extent);
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
        run_bounded(TOGETHER, budget, &stopped, parts).await
    }

    async fn write_extent(
        &self,
        extent: Prepared<'_, S>,
        from: IoVector,
        plan: DurabilityPlan,
    ) -> Result<()> {
        let ExtentState::Mapped { host } = extent.state else {
            return Err(self.misplaced(&extent));
        };
        let can_leave_holes = plan.may_leave_holes() && extent.flags.contains(ExtentFlags::ZEROED);
        if extent.alloc_range != extent.guest && !can_leave_holes {
            return Box::pin(self.write_whole(extent, host, from, plan)).await;
        }
        self.store(extent, host, from, plan).await
    }

    /// Writes to the place of a prepared extent, all of it, from `host` on; and commits it.
    pub(crate) async fn store(
        &self,
        mut extent: Prepared<'_, S>,
        host: u64,
        from: IoVector,
        plan: DurabilityPlan,
    ) -> Result<()> {
        let durability = plan.write_durability();
        let data_write = match plan.joins_writeback(&extent) {
            true => self.format.begin_data_write(),
            false => None,
        };
        extent.set_moving();
        let outcome = self.storage().write(host, from, durability).await;
        // Before the link, which may itself wait for a writeback. On another loop's thread the writeback
        // may begin between the two: then one more follows.
        drop(data_write);
        extent.settle(outcome, durability).await
    }

    /// Prepares the first bytes of `range` for a change.
    pub(crate) async fn prepare(
        &self,
        range: ByteRange,
        intent: Intent,
    ) -> Result<Prepared<'_, S>> {
        let extent = self.format.map(range, intent).await?;
        self.unpacked.forget(extent.alloc_range);
        Ok(Prepared::new(&self.format, extent))
    }

    /// An extent whose state makes no sense for what is to be done.
    pub(crate) fn misplaced(&self, extent: &Extent) -> Error {
        let what =
            format!("the {} mapping has no place for this: {:?}", self.format.name(), extent);
        Error::new(ErrorKind::Corrupt, what).on(self.name()).at(extent.guest.offset())
    }

    /// Where the guest's data is.
    pub(crate) fn storage(&self) -> &FlushTracker<S> {
        self.format.data()
    }
}

/// The part of a request's memory that belongs to the next extent.
fn take(vector: &mut IoVector, extent: &Extent) -> IoVector {
    let rest = vector.split_off(extent.guest.length() as usize);
    std::mem::replace(vector, rest)
}

/// The first bytes of a range that one extent may have.
fn first_part(range: ByteRange) -> ByteRange {
    if range.length() <= MAX_PART {
        return range;
    }
    let end = (range.offset() + MAX_PART) & !(CUT_ALIGNMENT - 1);
    range.truncate(end - range.offset())
}

/// What reading an extent computes, if it does not yield by itself.
fn cost_of_reading(extent: &Extent) -> u64 {
    let length = extent.guest.length();
    WorkBudget::LOOK_UP
        + match extent.state {
            ExtentState::Mapped { .. } => 0,
            ExtentState::Zero | ExtentState::Hole => length,
            ExtentState::Compressed { .. } => {
                extent.alloc_range.length() * WorkBudget::DECOMPRESSION
            }
            // As much as if all of it were a hole there.
            ExtentState::Backing => length,
        }
}

/// Sets every byte to zero, and yields meanwhile.
///
/// # Errors
/// EFAULT when the memory is lost.
pub(crate) async fn fill_with_zeros(mut memory: IoVector) -> Result<()> {
    let budget = WorkBudget::new();
    while memory.len() as u64 > WorkBudget::QUANTUM {
        let rest = memory.split_off(WorkBudget::QUANTUM as usize);
        memory.fill(0);
        memory.check_intact()?;
        memory = rest;
        budget.spend(WorkBudget::QUANTUM).await;
    }
    memory.fill(0);
    memory.check_intact()
}

#[cfg(test)]
mod long_requests;
#[cfg(test)]
mod tests;
