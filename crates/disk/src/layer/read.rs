//! Reads: each read looks up extent by extent, and reads each extent as its state requires.
//!
//! A range that an image leaves to its backing files is read from the layer that has its data. A
//! loop looks up the layers above that layer, or skips them if the result is known (see
//! [`BackingChain`]). So a read through a long chain needs no more futures than a read through two
//! layers.
//!
//! A read of one extent is one storage operation and nothing else; several extents are read
//! concurrently (see [`crate::parts`]). The host range of an extent is not reallocated until the
//! extent is read. A read of a backing file holds no guard of the image, because such a read may
//! never end.
//!
//! Between extents the read yields (see [`WorkBudget`]), so that work without waits (holes,
//! look-ups, decompression) does not delay other tasks of the thread. A read waits for all its
//! operations, even if one fails, because a request that was answered must no longer touch its
//! memory.

use std::cell::Cell;

use blockhouse_core::sync::run_bounded;
use blockhouse_core::{
    ByteRange, Extent, ExtentState, IoVector, Result, Storage, WorkBudget, rare,
};
use blockhouse_format::{DataPlace, Intent, ReadGuard};
use futures_util::future::LocalBoxFuture;
use futures_util::stream::{self, Stream, StreamExt};
use smallvec::SmallVec;

use super::backing_chain::BackingChain;
use super::backing_reads::{BackingReadGuard, Reader};
use super::{Layer, within};
use crate::parts::{MAX_IN_FLIGHT, first_part, take_part};

/// An extent, and the guard of its look-up.
pub(crate) type Found<'a> = (Extent, Option<ReadGuard<'a>>);

impl<S: Storage> Layer<S> {
    /// Fills `into` with the bytes of `range`, which lies inside the disk.
    pub(crate) async fn read(&self, range: ByteRange, into: IoVector) -> Result<()> {
        if self.alignment.admits(range.offset(), &into) {
            return self.read_aligned(range, into, Reader::Read).await;
        }
        // Boxed, so that the future of the common path stays small.
        rare(self.read_unaligned(range, into)).await
    }

    /// As [`read`](Self::read), for whole blocks into memory aligned for the storage.
    pub(crate) async fn read_aligned(
        &self,
        range: ByteRange,
        into: IoVector,
        reader: Reader,
    ) -> Result<()> {
        // While the guard is held, the extent's host range is not reallocated.
        let guard = self.format.begin_read();
        let first = self.format.map(first_part(range), Intent::Read).await?;
        if first.guest == range {
            return self.read_extent(&first, guard, into, reader).await;
        }
        // Boxed, so that the future of the common path stays small.
        rare(self.read_parts((first, guard), range, into, reader)).await
    }

    /// Fills `into` with those bytes of `range` that the image has itself; the bytes for ranges of
    /// the backing file stay unchanged.
    pub(crate) async fn read_own(&self, mut range: ByteRange, mut into: IoVector) -> Result<()> {
        let budget = WorkBudget::new();
        while !range.is_empty() {
            let (extent, guard) = self.find(range).await?;
            let part = take_part(&mut into, &extent);
            range = range.skip(extent.guest.length());
            if extent.state != ExtentState::Backing {
                self.read_extent(&extent, guard, part, Reader::Change).await?;
            }
            budget.spend(WorkBudget::LOOK_UP).await;
        }
        Ok(())
    }

    /// The first extent of `range`. Its host range is not reallocated while the guard exists.
    async fn find(&self, range: ByteRange) -> Result<Found<'_>> {
        let guard = self.format.begin_read();
        Ok((self.format.map(first_part(range), Intent::Read).await?, guard))
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
                self.data().prefetch(host).await?;
            }
            budget.spend(WorkBudget::LOOK_UP).await;
        }
        Ok(())
    }

    /// Reads a range of several extents, the first of which is known.
    async fn read_parts(
        &self,
        first: Found<'_>,
        range: ByteRange,
        into: IoVector,
        reader: Reader,
    ) -> Result<()> {
        let stopped = Cell::new(false);
        let extents = stream::unfold((Some(first), range), |(known, rest)| {
            let is_over = rest.is_empty() || stopped.get();
            async move {
                let extent = match known {
                    _ if is_over => return None,
                    Some(found) => Ok(found),
                    None => self.find(rest).await,
                };
                let length = extent.as_ref().map_or(rest.length(), |(one, _)| one.guest.length());
                Some((extent, (None, rest.skip(length))))
            }
        });
        self.read_extents(extents, into, &stopped, reader).await
    }

    pub(crate) async fn read_extents(
        &self,
        extents: impl Stream<Item = Result<Found<'_>>>,
        mut into: IoVector,
        stopped: &Cell<bool>,
        reader: Reader,
    ) -> Result<()> {
        let budget = &WorkBudget::new();
        let parts = extents.map(|found| {
            let part = found.map(|(extent, guard)| (extent, guard, take_part(&mut into, &extent)));
            async move {
                let (extent, guard, into) = part?;
                let outcome = self.read_extent(&extent, guard, into, reader).await;
                budget.charge(cost_of_reading(&extent));
                outcome
            }
        });
        run_bounded(MAX_IN_FLIGHT, budget, stopped, parts).await
    }

    /// Reads one extent. `guard` is the guard of its look-up, and is dropped when the extent's host
    /// range has been read.
    async fn read_extent(
        &self,
        extent: &Extent,
        guard: Option<ReadGuard<'_>>,
        mut into: IoVector,
        reader: Reader,
    ) -> Result<()> {
        match extent.state {
            ExtentState::Mapped { host } => {
                let place = DataPlace { guest: extent.guest.offset(), host };
                self.read_place(place, into).await
            }
            ExtentState::Zero | ExtentState::Hole if into.len() as u64 > WorkBudget::QUANTUM => {
                rare(fill_with_zeros(into)).await
            }
            ExtentState::Zero | ExtentState::Hole => {
                into.fill(0);
                into.check_intact()
            }
            ExtentState::Compressed { host, length } => {
                rare(self.read_compressed(extent, host, length, into)).await
            }
            ExtentState::Backing => self.read_backing(extent.guest, guard, into, reader).await,
        }
    }

    /// Fills `into` with the bytes of `range`, which the image leaves to its backing files. The
    /// backing file is found while the guard exists, because the file may be detached afterwards.
    /// The read of the backing file is awaited without the guard.
    fn read_backing<'a>(
        &'a self,
        range: ByteRange,
        guard: Option<ReadGuard<'_>>,
        into: IoVector,
        reader: Reader,
    ) -> LocalBoxFuture<'a, Result<()>> {
        // The read is registered first: either a change of the chain waits for the read, or the
        // read sees the changed chain.
        let read = self.backing_reads.begin(range, reader);
        let (nearest, chain) = (self.backing(), BackingChain::known(self));
        drop(guard);
        Box::pin(async move {
            let nearest = nearest?;
            let Some(chain) = chain else { return nearest.read_from(range, into, reader).await };
            let (index, part) = chain.find(range, &WorkBudget::new()).await;
            if part == range {
                read.set_depth(index + 1);
                return chain.layer(index).read_from(range, into, reader).await;
            }
            rare(read_along(chain, range, into, reader)).await
        })
    }

    /// Fills `into` with the bytes of `range` from this layer or its backing files; zeros past this
    /// layer's end.
    async fn read_from(
        &self,
        mut range: ByteRange,
        mut into: IoVector,
        reader: Reader,
    ) -> Result<()> {
        let budget = WorkBudget::new();
        let mut layer = self;
        let mut passed: SmallVec<[BackingReadGuard<'_>; 2]> = SmallVec::new();
        loop {
            let inside = within(range, layer.size());
            if inside != range {
                fill_with_zeros(into.split_off(inside.length() as usize)).await?;
            }
            if inside.is_empty() {
                return Ok(());
            }
            let (first, guard) = layer.find(inside).await?;
            let is_whole = first.guest == inside;
            if is_whole && first.state == ExtentState::Backing {
                passed.push(layer.backing_reads.begin(inside, reader));
                (layer, range) = (layer.backing()?, inside);
                budget.spend(WorkBudget::LOOK_UP).await;
            } else if !layer.alignment.admits(inside.offset(), &into) {
                // The unaligned read may wait for other things than reads, so it must not hold the
                // guard.
                drop(guard);
                return rare(layer.read_unaligned(inside, into)).await;
            } else if is_whole {
                return layer.read_extent(&first, guard, into, reader).await;
            } else {
                return rare(layer.read_parts((first, guard), inside, into, reader)).await;
            }
        }
    }
}

/// Fills `into` with the bytes of `range`, whose parts are in several layers of the chain.
async fn read_along<S: Storage>(
    chain: &BackingChain<S>,
    range: ByteRange,
    mut into: IoVector,
    reader: Reader,
) -> Result<()> {
    let (stopped, budget) = (&Cell::new(false), &WorkBudget::new());
    let found = stream::unfold(range, |rest| async move {
        if rest.is_empty() || stopped.get() {
            return None;
        }
        let (index, part) = chain.find(rest, budget).await;
        Some(((index, part), rest.skip(part.length())))
    });
    let parts = found.map(|(index, part)| {
        let rest = into.split_off(part.length() as usize);
        let into = std::mem::replace(&mut into, rest);
        async move {
            let outcome = chain.layer(index).read_from(part, into, reader).await;
            // The cost is as if the whole range were a hole there.
            budget.charge(WorkBudget::LOOK_UP + part.length());
            outcome
        }
    });
    run_bounded(MAX_IN_FLIGHT, budget, stopped, parts).await
}

/// The cost of reading an extent, if the read does not yield by itself.
fn cost_of_reading(extent: &Extent) -> u64 {
    let length = extent.guest.length();
    WorkBudget::LOOK_UP
        + match extent.state {
            ExtentState::Mapped { .. } => 0,
            ExtentState::Zero | ExtentState::Hole => length,
            ExtentState::Compressed { .. } => {
                extent.alloc_range.length() * WorkBudget::DECOMPRESSION
            }
            // The cost is as if the whole range were a hole there.
            ExtentState::Backing => length,
        }
}

/// Sets every byte to zero, and yields in between.
///
/// # Errors
/// EFAULT when the memory is lost.
async fn fill_with_zeros(mut memory: IoVector) -> Result<()> {
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
