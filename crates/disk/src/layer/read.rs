//! A read: mapped extent by extent, each moved as its state says.
//!
//! What an image leaves to its backing files is read from the layer that has it: those between are asked in a loop, or passed over
//! where that is known (see [`BackingChain`]), so a read through a long chain costs no more futures than one of two layers.
//!
//! One extent is one storage operation and nothing else; several run together (see [`crate::parts`]).
//! Between them the read yields, see [`WorkBudget`]: what needs no waiting (holes, look-ups, decompression)
//! keeps no other task of the thread waiting. All operations of a read are waited for, also when one
//! fails: a request that was answered must not touch its memory any more.

use std::cell::Cell;

use blockhouse_core::sync::run_bounded;
use blockhouse_core::{ByteRange, Extent, ExtentState, IoVector, Result, Storage, WorkBudget};
use blockhouse_format::Intent;
use futures_util::future::LocalBoxFuture;
use futures_util::stream::{self, Stream, StreamExt};

use super::backing_chain::BackingChain;
use super::{Layer, within};
use crate::parts::{MAX_IN_FLIGHT, first_part, take_part};

impl<S: Storage> Layer<S> {
    /// Fills `into` with the bytes of `range`, which lies inside the disk.
    pub(crate) async fn read(&self, range: ByteRange, into: IoVector) -> Result<()> {
        if self.alignment.admits(range.offset(), &into) {
            return self.read_aligned(range, into).await;
        }
        // Boxed, so that the future of the common way stays small.
        Box::pin(self.read_unaligned(range, into)).await
    }

    /// As [`read`](Self::read), of whole blocks into memory that suits the storage.
    pub(crate) async fn read_aligned(&self, range: ByteRange, into: IoVector) -> Result<()> {
        // What is read keeps its place until it is read.
        let _guard = self.format.begin_read();
        let first = self.format.map(first_part(range), Intent::Read).await?;
        if first.guest == range {
            return self.read_extent(&first, into).await;
        }
        // Boxed, so that the future of the common way stays small.
        Box::pin(self.read_parts(first, range, into)).await
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

    pub(crate) async fn read_extents(
        &self,
        extents: impl Stream<Item = Result<Extent>>,
        mut into: IoVector,
        stopped: &Cell<bool>,
    ) -> Result<()> {
        let budget = &WorkBudget::new();
        let parts = extents.map(|extent| {
            let part = extent.map(|extent| (extent, take_part(&mut into, &extent)));
            async move {
                let (extent, into) = part?;
                let outcome = self.read_extent(&extent, into).await;
                budget.charge(cost_of_reading(&extent));
                outcome
            }
        });
        run_bounded(MAX_IN_FLIGHT, budget, stopped, parts).await
    }

    async fn read_extent(&self, extent: &Extent, mut into: IoVector) -> Result<()> {
        match extent.state {
            ExtentState::Mapped { host } => self.read_host(host, into).await,
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
            ExtentState::Backing => self.read_backing(extent.guest, into).await,
        }
    }

    /// Fills `into` with the bytes of `range`, which the image leaves to its backing files.
    fn read_backing(&self, range: ByteRange, into: IoVector) -> LocalBoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let nearest = self.backing()?;
            let Some(chain) = self.chain() else { return nearest.read_from(range, into).await };
            let (layer, part) = chain.find(range, &WorkBudget::new()).await;
            if part == range {
                return layer.read_from(range, into).await;
            }
            Box::pin(read_along(chain, range, into)).await
        })
    }

    /// Fills `into` with the bytes of `range` from this layer or those behind it; zeros past its end.
    async fn read_from(&self, mut range: ByteRange, mut into: IoVector) -> Result<()> {
        let budget = WorkBudget::new();
        let mut layer = self;
        loop {
            let inside = within(range, layer.size());
            if inside != range {
                fill_with_zeros(into.split_off(inside.length() as usize)).await?;
            }
            if inside.is_empty() {
                return Ok(());
            }
            let guard = layer.format.begin_read();
            let first = layer.format.map(first_part(inside), Intent::Read).await?;
            let is_whole = first.guest == inside;
            if is_whole && first.state == ExtentState::Backing {
                (layer, range) = (layer.backing()?, inside);
                budget.spend(WorkBudget::LOOK_UP).await;
            } else if !layer.alignment.admits(inside.offset(), &into) {
                // It waits for other things than reads.
                drop(guard);
                return Box::pin(layer.read_unaligned(inside, into)).await;
            } else if is_whole {
                return layer.read_extent(&first, into).await;
            } else {
                return Box::pin(layer.read_parts(first, inside, into)).await;
            }
        }
    }
}

/// Fills `into` with the bytes of `range`, whose parts are in several layers of the chain.
async fn read_along<S: Storage>(
    chain: &BackingChain<S>,
    range: ByteRange,
    mut into: IoVector,
) -> Result<()> {
    let (stopped, budget) = (&Cell::new(false), &WorkBudget::new());
    let found = stream::unfold(range, |rest| async move {
        if rest.is_empty() || stopped.get() {
            return None;
        }
        let (layer, part) = chain.find(rest, budget).await;
        Some(((layer, part), rest.skip(part.length())))
    });
    let parts = found.map(|(layer, part)| {
        let rest = into.split_off(part.length() as usize);
        let into = std::mem::replace(&mut into, rest);
        async move {
            let outcome = layer.read_from(part, into).await;
            // As much as if all of it were a hole there.
            budget.charge(WorkBudget::LOOK_UP + part.length());
            outcome
        }
    });
    run_bounded(MAX_IN_FLIGHT, budget, stopped, parts).await
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
