//! The way of a request: mapped extent by extent, each moved as its state says, made durable once.
//!
//! Everything here is aligned (see [`crate::bounce`] for the rest) and inside the disk. A request
//! first learns all its extents; with that the durability decision is made, and the data moves: one
//! extent is one storage operation and nothing else, several go down together, a few at a time.
//! Each prepared extent is committed as soon as its data arrived. All operations of a request are
//! waited for, also when one fails, since a request that was answered must not touch the disk or
//! its memory any more.

use std::future::{Future, ready};
use std::ops::Deref;

use blockhouse_core::{
    ByteRange, Durability, Effort, Error, ErrorKind, Extent, ExtentState, IoVector, Offload,
    Result, Storage, Unmap,
};
use blockhouse_format::{Abort, Format, Intent};
use futures_util::stream::{self, StreamExt};
use smallvec::SmallVec;

use crate::Disk;
use crate::durable::{Debt, Plan};
use crate::generations::Generations;
use crate::limits::PIECE;

/// How many operations of one request are in flight together.
const TOGETHER: usize = 16;

/// The extents of a request. Most have one.
type Extents = SmallVec<[Extent; 1]>;
type PreparedExtents<'a, S> = SmallVec<[Prepared<'a, S>; 1]>;

impl<S: Storage> Disk<S> {
    /// Fills `into` with the bytes of `range`.
    pub(crate) async fn read(&self, range: ByteRange, into: IoVector) -> Result<()> {
        let extents = self.map(range).await?;
        self.read_extents(&extents, into).await
    }

    /// Stores `from` in `range`; the answer says what is left to do for its durability.
    pub(crate) async fn write(
        &self,
        range: ByteRange,
        from: IoVector,
        durability: Durability,
    ) -> Result<Debt> {
        let extents = self.prepare(range, Intent::Write).await?;
        self.write_extents(extents, from, durability).await
    }

    /// Makes `range` read as zeros.
    pub(crate) async fn zero(
        &self,
        range: ByteRange,
        unmap: Unmap,
        effort: Effort,
        durability: Durability,
    ) -> Result<Debt> {
        let extents = self.prepare(range, Intent::Zero).await?;
        self.zero_extents(extents, unmap, effort, durability).await
    }

    /// Gives the space of `range` back, as far as the storage can.
    pub(crate) async fn discard(&self, range: ByteRange, durability: Durability) -> Result<Debt> {
        for extent in self.prepare(range, Intent::Discard).await? {
            self.discard_extent(extent).await?;
        }
        Ok(Plan::without_fua(durability, self.storage().capabilities().fua).debt())
    }

    /// Tells the storage that `range` will be read.
    pub(crate) async fn prefetch(&self, range: ByteRange) -> Result<()> {
        for extent in self.map(range).await? {
            if let ExtentState::Mapped { host } = extent.state {
                let range = ByteRange::between(host, host + extent.guest.length());
                self.storage().prefetch(range).await?;
            }
        }
        Ok(())
    }

    async fn read_extents(&self, extents: &[Extent], mut into: IoVector) -> Result<()> {
        if let [only] = extents {
            return self.read_extent(only, into).await;
        }
        let parts = extents.iter().map(|extent| self.read_extent(extent, take(&mut into, extent)));
        all(parts).await
    }

    async fn read_extent(&self, extent: &Extent, mut into: IoVector) -> Result<()> {
        match extent.state {
            ExtentState::Mapped { host } => self.storage().read(host, into).await,
            ExtentState::Zero | ExtentState::Hole => {
                into.fill(0);
                Ok(())
            }
            ExtentState::Compressed { .. } | ExtentState::Backing => Err(self.misplaced(extent)),
        }
    }

    async fn write_extents(
        &self,
        mut extents: PreparedExtents<'_, S>,
        mut from: IoVector,
        durability: Durability,
    ) -> Result<Debt> {
        let fua = self.storage().capabilities().fua;
        let plan = Plan::for_writes(durability, fua, extents.iter().map(Deref::deref));
        let durability = plan.of_each_write();
        if extents.len() == 1
            && let Some(only) = extents.pop()
        {
            self.write_extent(only, from, durability).await?;
        } else {
            let parts = extents.into_iter().map(|extent| {
                let part = take(&mut from, &extent);
                self.write_extent(extent, part, durability)
            });
            all(parts).await?;
        }
        Ok(plan.debt())
    }

    async fn write_extent(
        &self,
        extent: Prepared<'_, S>,
        from: IoVector,
        durability: Durability,
    ) -> Result<()> {
        let ExtentState::Mapped { host } = extent.state else {
            return Err(self.misplaced(&extent));
        };
        extent.moved(self.storage().write(host, from, durability)).await
    }

    async fn zero_extents(
        &self,
        extents: PreparedExtents<'_, S>,
        unmap: Unmap,
        mut effort: Effort,
        durability: Durability,
    ) -> Result<Debt> {
        let mut debt = Debt::NOTHING;
        for extent in extents {
            debt = debt.and(self.zero_extent(extent, unmap, effort, durability).await?);
            // Something has changed: it is too late to refuse.
            effort = Effort::Any;
        }
        Ok(debt)
    }

    async fn zero_extent(
        &self,
        extent: Prepared<'_, S>,
        unmap: Unmap,
        effort: Effort,
        durability: Durability,
    ) -> Result<Debt> {
        let storage = self.storage();
        let capabilities = storage.capabilities();
        let afterwards = Plan::without_fua(durability, capabilities.fua);
        let host = match extent.state {
            ExtentState::Mapped { host } => ByteRange::between(host, host + extent.guest.length()),
            ExtentState::Zero | ExtentState::Hole => {
                extent.moved(ready(Ok(()))).await?;
                return Ok(afterwards.debt());
            }
            ExtentState::Compressed { .. } | ExtentState::Backing => {
                return Err(self.misplaced(&extent));
            }
        };
        let pure = Plan::for_writes(durability, capabilities.fua, [&*extent].into_iter());
        let zero = async {
            if capabilities.write_zeroes == Offload::Available {
                match storage.write_zeroes(host, unmap).await {
                    Err(error) if error.kind() == ErrorKind::Unsupported => {}
                    outcome => return outcome.map(|()| afterwards.debt()),
                }
            }
            if effort == Effort::FastOnly {
                return Err(self.no_fast_zeroes(host.offset()));
            }
            let plan = if host.length() <= PIECE as u64 { pure } else { afterwards };
            self.write_zero_data(host, plan.of_each_write()).await?;
            Ok(plan.debt())
        };
        extent.moved(zero).await
    }

    /// Writes zeros to the storage by hand.
    async fn write_zero_data(&self, host: ByteRange, durability: Durability) -> Result<()> {
        let mut zeros = self.bounce_buffers.get(host.length().min(PIECE as u64) as usize).await;
        zeros.bytes_mut().fill(0);
        let mut rest = host;
        while !rest.is_empty() {
            let piece = rest.truncate(PIECE as u64);
            let vector = zeros.lend_range(0, piece.length() as usize);
            self.storage().write(piece.offset(), vector, durability).await?;
            rest = rest.skip(piece.length());
        }
        Ok(())
    }

    /// A storage that cannot discard has not failed: a discard is a hint.
    async fn discard_extent(&self, extent: Prepared<'_, S>) -> Result<()> {
        let storage = self.storage();
        let ExtentState::Mapped { host } = extent.state else {
            return extent.moved(ready(Ok(()))).await;
        };
        let range = ByteRange::between(host, host + extent.guest.length());
        let discard = async {
            if storage.capabilities().discard == Offload::Unavailable {
                return Ok(());
            }
            match storage.discard(range).await {
                Err(error) if error.kind() == ErrorKind::Unsupported => Ok(()),
                outcome => outcome,
            }
        };
        extent.moved(discard).await
    }

    async fn map(&self, range: ByteRange) -> Result<Extents> {
        let mut extents = Extents::new();
        let mut rest = range;
        while !rest.is_empty() {
            let extent = self.format.map(rest, Intent::Read).await?;
            rest = rest.skip(extent.guest.length());
            extents.push(extent);
        }
        Ok(extents)
    }

    async fn prepare(&self, range: ByteRange, intent: Intent) -> Result<PreparedExtents<'_, S>> {
        let mut extents = PreparedExtents::new();
        let mut rest = range;
        while !rest.is_empty() {
            let extent = self.format.map(rest, intent).await?;
            rest = rest.skip(extent.guest.length());
            extents.push(Prepared { format: &self.format, extent, stage: Stage::Idle });
        }
        Ok(extents)
    }

    fn misplaced(&self, extent: &Extent) -> Error {
        let what =
            format!("the {} mapping has no place for this: {:?}", self.format.name(), extent);
        Error::new(ErrorKind::Corrupt, what).on(self.name()).at(extent.guest.offset())
    }

    pub(crate) fn no_fast_zeroes(&self, offset: u64) -> Error {
        let what = "writing zeros is no faster than writing data";
        Error::new(ErrorKind::Unsupported, what).on(self.name()).at(offset)
    }

    fn storage(&self) -> &Generations<S> {
        self.format.storage()
    }
}

/// An extent that was prepared for a change: committed when its data arrived, else given back, also
/// when the request is dropped.
struct Prepared<'a, S: Storage> {
    format: &'a Format<Generations<S>>,
    extent: Extent,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// No operation is under way.
    Idle,
    /// The storage is at work.
    Moving,
    /// Committed, or being so.
    Committed,
}

impl<S: Storage> Prepared<'_, S> {
    /// Moves the data by `operation`, then commits.
    async fn moved<T>(mut self, operation: impl Future<Output = Result<T>>) -> Result<T> {
        self.stage = Stage::Moving;
        let outcome = operation.await;
        self.stage = Stage::Idle;
        let value = outcome?;
        self.stage = Stage::Committed;
        self.format.commit(self.extent).await?;
        Ok(value)
    }
}

impl<S: Storage> Deref for Prepared<'_, S> {
    type Target = Extent;

    fn deref(&self) -> &Extent {
        &self.extent
    }
}

impl<S: Storage> Drop for Prepared<'_, S> {
    fn drop(&mut self) {
        match self.stage {
            Stage::Idle => self.format.abort(self.extent, Abort::Ended),
            Stage::Moving => self.format.abort(self.extent, Abort::InFlight),
            Stage::Committed => {}
        }
    }
}

/// The part of a request's memory that belongs to the next extent.
fn take(vector: &mut IoVector, extent: &Extent) -> IoVector {
    let rest = vector.split_off(extent.guest.length() as usize);
    std::mem::replace(vector, rest)
}

/// Runs all parts to their end, several at a time; the first error counts.
async fn all(parts: impl Iterator<Item = impl Future<Output = Result<()>>>) -> Result<()> {
    let both = |sum: Result<()>, one| ready(sum.and(one));
    stream::iter(parts).buffer_unordered(TOGETHER).fold(Ok(()), both).await
}

#[cfg(test)]
mod tests;
