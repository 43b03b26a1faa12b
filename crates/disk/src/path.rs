//! The way of a request: mapped extent by extent, each moved as its state says, made durable once.
//!
//! Everything here is aligned (see [`crate::bounce`] for the rest) and inside the disk. A read or
//! write first learns all its extents; with that the durability decision is made, and the data moves:
//! one extent is one storage operation and nothing else, several go down together, a few at a time.
//! Each prepared extent is committed as soon as its data arrived. All operations of a request are
//! waited for, also when one fails, since a request that was answered must not touch the disk or
//! its memory any more.

use std::future::{Future, ready};
use std::ops::Deref;

use blockhouse_core::{
    ByteRange, Durability, Error, ErrorKind, Extent, ExtentFlags, ExtentState, Fua, IoVector,
    Result, Storage,
};
use blockhouse_format::Intent;
use futures_util::stream::{self, StreamExt};

use crate::Disk;
use crate::durable::{Debt, Plan};
use crate::generations::Generations;
use crate::prepared::Prepared;

/// How many operations of one request are in flight together.
const TOGETHER: usize = 16;
/// The most bytes of a guest that a round of tables waits for: more take as long as a round of their own.
const LONGEST_AWAITED: u64 = 256 * 1024;

impl<S: Storage> Disk<S> {
    /// Fills `into` with the bytes of `range`.
    pub(crate) async fn read(&self, range: ByteRange, into: IoVector) -> Result<()> {
        // What is read keeps its place until it is read.
        let _hold = self.format.hold();
        let first = self.format.map(range, Intent::Read).await?;
        if first.guest == range {
            return self.read_extent(&first, into).await;
        }
        // Boxed, so that the future of the common way stays small.
        Box::pin(async move {
            let mut extents = vec![first];
            let mut rest = range.skip(first.guest.length());
            while !rest.is_empty() {
                let extent = self.format.map(rest, Intent::Read).await?;
                rest = rest.skip(extent.guest.length());
                extents.push(extent);
            }
            self.read_extents(&extents, into).await
        })
        .await
    }

    /// Stores `from` in `range`; the answer says what is left to do for its durability.
    pub(crate) async fn write(
        &self,
        range: ByteRange,
        from: IoVector,
        durability: Durability,
    ) -> Result<Debt> {
        let first = self.prepare(range, Intent::Write).await?;
        if first.guest == range {
            let plan = self.plan([&*first].into_iter(), durability);
            let debt = plan.debt_for([&*first].into_iter());
            self.write_extent(first, from, plan).await?;
            return Ok(debt);
        }
        Box::pin(async move {
            let mut rest = range.skip(first.guest.length());
            let mut extents = vec![first];
            while !rest.is_empty() {
                let extent = self.prepare(rest, Intent::Write).await?;
                rest = rest.skip(extent.guest.length());
                extents.push(extent);
            }
            self.write_extents(extents, from, durability).await
        })
        .await
    }

    /// Tells the storage that `range` will be read.
    pub(crate) async fn prefetch(&self, range: ByteRange) -> Result<()> {
        let mut rest = range;
        while !rest.is_empty() {
            let extent = self.format.map(rest, Intent::Read).await?;
            rest = rest.skip(extent.guest.length());
            if let ExtentState::Mapped { host } = extent.state {
                let host = ByteRange::between(host, host + extent.guest.length());
                self.storage().prefetch(host).await?;
            }
        }
        Ok(())
    }

    async fn read_extents(&self, extents: &[Extent], mut into: IoVector) -> Result<()> {
        all(extents.iter().map(|extent| self.read_extent(extent, take(&mut into, extent)))).await
    }

    async fn read_extent(&self, extent: &Extent, mut into: IoVector) -> Result<()> {
        match extent.state {
            ExtentState::Mapped { host } => self.read_place(host, into).await,
            ExtentState::Zero | ExtentState::Hole => {
                into.fill(0);
                Ok(())
            }
            ExtentState::Compressed { host, length } => {
                Box::pin(self.read_compressed(extent, host, length, into)).await
            }
            ExtentState::Backing => self.read_behind(extent.guest, into).await,
        }
    }

    async fn write_extents(
        &self,
        extents: Vec<Prepared<'_, S>>,
        mut from: IoVector,
        durability: Durability,
    ) -> Result<Debt> {
        let plan = self.plan(extents.iter().map(Deref::deref), durability);
        let debt = plan.debt_for(extents.iter().map(Deref::deref));
        let parts = extents.into_iter().map(|extent| {
            let part = take(&mut from, &extent);
            self.write_extent(extent, part, plan)
        });
        all(parts).await?;
        Ok(debt)
    }

    /// How writes of data to prepared extents become durable.
    fn plan<'a>(
        &self,
        extents: impl ExactSizeIterator<Item = &'a Extent> + Clone,
        durability: Durability,
    ) -> Plan {
        Plan::for_writes(durability, self.fua(), extents, || self.format.persistence())
    }

    async fn write_extent(
        &self,
        extent: Prepared<'_, S>,
        from: IoVector,
        plan: Plan,
    ) -> Result<()> {
        let ExtentState::Mapped { host } = extent.state else {
            return Err(self.misplaced(&extent));
        };
        // Durable writes leave no holes: to fill one later by FUA costs the host file system's journal.
        let can_leave_holes = plan == Plan::Plain && extent.flags.contains(ExtentFlags::BLANK);
        if extent.whole != extent.guest && !can_leave_holes {
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
        plan: Plan,
    ) -> Result<()> {
        let durability = plan.of_each_write();
        let needs_round = matches!(plan, Plan::ThenFlush(_)) && !extent.is_pure_overwrite();
        let is_short = extent.guest.length() <= LONGEST_AWAITED;
        let arriving = if needs_round && is_short { self.format.arriving() } else { None };
        extent.set_moving();
        let outcome = self.storage().write(host, from, durability).await;
        // Before the commit, which may itself wait for a round. On another loop's thread the round may
        // begin between the two: then there is another one.
        drop(arriving);
        extent.settle(outcome, durability).await
    }

    /// Prepares the first bytes of `range` for a change.
    pub(crate) async fn prepare(
        &self,
        range: ByteRange,
        intent: Intent,
    ) -> Result<Prepared<'_, S>> {
        let extent = self.format.map(range, intent).await?;
        self.unpacked.forget(extent.whole);
        Ok(Prepared::new(&self.format, extent))
    }

    /// An extent whose state makes no sense for what is to be done.
    pub(crate) fn misplaced(&self, extent: &Extent) -> Error {
        let what =
            format!("the {} mapping has no place for this: {:?}", self.format.name(), extent);
        Error::new(ErrorKind::Corrupt, what).on(self.name()).at(extent.guest.offset())
    }

    /// Where the guest's data is.
    pub(crate) fn storage(&self) -> &Generations<S> {
        self.format.data()
    }

    pub(crate) fn fua(&self) -> Fua {
        self.storage().capabilities().fua
    }
}

/// The part of a request's memory that belongs to the next extent.
fn take(vector: &mut IoVector, extent: &Extent) -> IoVector {
    let rest = vector.split_off(extent.guest.length() as usize);
    std::mem::replace(vector, rest)
}

/// Runs all parts to their end, several at a time; the first error counts.
pub(crate) async fn all(
    parts: impl Iterator<Item = impl Future<Output = Result<()>>>,
) -> Result<()> {
    let both = |sum: Result<()>, one| ready(sum.and(one));
    stream::iter(parts).buffer_unordered(TOGETHER).fold(Ok(()), both).await
}

#[cfg(test)]
mod tests;
