//! Changes without data: zero writes and discards.
//!
//! If the storage has an operation for zeroing, it zeroes whole blocks. Otherwise zeros are written
//! as data, in chunks from one buffer; a request that allows no fallback fails. A discard is a
//! hint, so it succeeds even if the storage does not support discards. Blocks that a zero write
//! covers only in part are written like any unaligned data. Extents are changed one after the
//! other, and long requests yield between them (see [`WorkBudget`]).

use blockhouse_core::{
    Buffer, ByteRange, Durability, Error, ErrorKind, ExtentState, Fallback, Offload, Result,
    Storage, Unmap, WorkBudget,
};
use blockhouse_format::{DataPlace, Intent};

use super::Writer;
use super::prepared_extent::PreparedExtent;
use crate::buffers::CHUNK_SIZE;
use crate::claims::Claim;
use crate::durability::{RequestSync, Writes};

/// The options of a zero write.
#[derive(Clone, Copy)]
pub(crate) struct ZeroOptions {
    pub(crate) unmap: Unmap,
    pub(crate) fallback: Fallback,
    /// Whether parts of at most [`CHUNK_SIZE`] bytes with allocated space are written as zeros.
    /// Reason: a hole would split an extent of the file, and save no space in the long run.
    pub(crate) writes_small: bool,
}

impl<S: Storage> Writer<S> {
    /// Makes `range` read as zeros. Zeroes whole blocks first, because a refusal must precede any
    /// change, and then the edges. `claim` covers all blocks of the range.
    pub(crate) async fn write_zeroes(
        &self,
        range: ByteRange,
        how: ZeroOptions,
        sync: &RequestSync<'_, S>,
        claim: &Claim<'_>,
    ) -> Result<()> {
        let Some(middle) = range.align_inward(self.layer.block_size()) else {
            if how.fallback == Fallback::Forbidden {
                return Err(self.fast_zero_error(range.offset()));
            }
            return self.write_small_zeroes(range, sync, claim).await;
        };
        let head = ByteRange::between(range.offset(), middle.offset());
        let tail = ByteRange::between(middle.end(), range.end());
        self.zero_blocks(middle, how, sync).await?;
        for edge in [head, tail] {
            self.write_small_zeroes(edge, sync, claim).await?;
        }
        Ok(())
    }

    async fn zero_blocks(
        &self,
        range: ByteRange,
        mut how: ZeroOptions,
        sync: &RequestSync<'_, S>,
    ) -> Result<()> {
        let budget = WorkBudget::new();
        let mut rest = range;
        while !rest.is_empty() {
            let extent = self.prepare_for(sync, rest, Intent::Zero(how.unmap)).await?;
            rest = rest.skip(extent.guest.length());
            self.zero_extent(extent, how, sync).await?;
            // After the first change, the request can no longer be refused.
            how.fallback = Fallback::Allowed;
            budget.spend(WorkBudget::LOOK_UP).await;
        }
        Ok(())
    }

    pub(super) async fn zero_extent(
        &self,
        mut extent: PreparedExtent<'_, S>,
        how: ZeroOptions,
        sync: &RequestSync<'_, S>,
    ) -> Result<()> {
        match extent.state {
            ExtentState::Mapped { host } => {
                let is_pure_overwrite = extent.is_pure_overwrite();
                let range = ByteRange::between(host, host + extent.guest.length());
                let copied = self.copy_cow_regions(&mut extent, host).await;
                extent.begin_io();
                let outcome = match copied {
                    Ok(()) => {
                        let guest = extent.guest.offset();
                        self.zero_host_range(guest, range, is_pure_overwrite, how, sync).await
                    }
                    Err(error) => Err(error),
                };
                extent.complete(outcome, Durability::None).await
            }
            ExtentState::Zero | ExtentState::Hole => {
                sync.note_metadata_change();
                extent.complete(Ok(()), Durability::Data).await
            }
            ExtentState::Compressed { .. } | ExtentState::Backing => {
                Err(self.layer.misplaced(&extent))
            }
        }
    }

    /// Makes `host`, the range of the bytes from `guest` on, read as zeros: by the storage's own
    /// operation, else with written zeros.
    async fn zero_host_range(
        &self,
        guest: u64,
        host: ByteRange,
        is_pure_overwrite: bool,
        how: ZeroOptions,
        sync: &RequestSync<'_, S>,
    ) -> Result<()> {
        // New space may be past the end of the storage, and a zero write there would change
        // nothing.
        let is_inside = host.end() <= self.layer.data().size();
        let is_small = how.writes_small && host.length() <= CHUNK_SIZE as u64;
        let has_offload = self.layer.data_capabilities().write_zeroes == Offload::Available;
        if has_offload && is_inside && !is_small {
            match self.layer.data().write_data_zeroes(host, how.unmap).await {
                Err(error) if error.kind() == ErrorKind::Unsupported => {}
                outcome => {
                    sync.note_plain_operation();
                    return outcome;
                }
            }
        }
        if how.fallback == Fallback::Forbidden {
            return Err(self.fast_zero_error(host.offset()));
        }
        let is_one_write = host.length() <= CHUNK_SIZE as u64;
        let writes = if is_one_write { Writes::Counted(1) } else { Writes::Unbounded };
        let durability = sync.plan_zeros(is_pure_overwrite, writes).write_durability();
        let mut zeros =
            self.layer.bounce_buffers().get(host.length().min(CHUNK_SIZE as u64) as usize).await?;
        zeros.bytes_mut().fill(0);
        let mut rest = host;
        while !rest.is_empty() {
            let chunk = rest.truncate(CHUNK_SIZE as u64);
            let vector = zeros.lend_range(0, chunk.length() as usize);
            let place = DataPlace { guest, host: host.offset() };
            let place = place.skip(chunk.offset() - host.offset());
            self.layer.write_data(place, vector, durability).await?;
            rest = rest.skip(chunk.length());
        }
        Ok(())
    }

    /// Writes zeros to a range of less than two blocks.
    async fn write_small_zeroes(
        &self,
        range: ByteRange,
        sync: &RequestSync<'_, S>,
        claim: &Claim<'_>,
    ) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let zeros = Buffer::try_new(range.length() as usize)?.lend();
        self.write_unaligned(range, zeros, sync, claim).await
    }

    /// The error of a zero write that allows no fallback and has no fast implementation.
    pub(crate) fn fast_zero_error(&self, offset: u64) -> Error {
        let what = "writing zeros is no faster than writing data";
        Error::new(ErrorKind::Unsupported, what).on(self.layer.name()).at(offset)
    }

    /// Gives the space of `range` back, as far as the storage can.
    pub(crate) async fn discard(&self, range: ByteRange, sync: &RequestSync<'_, S>) -> Result<()> {
        let budget = WorkBudget::new();
        sync.note_metadata_change();
        let mut rest = range;
        while !rest.is_empty() {
            let mut extent = self.prepare(rest, Intent::Discard).await?;
            rest = rest.skip(extent.guest.length());
            match extent.state {
                ExtentState::Mapped { host } => {
                    let range = ByteRange::between(host, host + extent.guest.length());
                    extent.begin_io();
                    let outcome = self.discard_host_range(range).await;
                    extent.complete(outcome, Durability::None).await?;
                    sync.note_plain_operation();
                }
                _ => extent.complete(Ok(()), Durability::Data).await?,
            }
            budget.spend(WorkBudget::LOOK_UP).await;
        }
        Ok(())
    }

    async fn discard_host_range(&self, host: ByteRange) -> Result<()> {
        let storage = self.layer.data();
        let block = u64::from(storage.capabilities().alignment.offset);
        let Some(whole) = host.align_inward(block) else { return Ok(()) };
        let is_inside = whole.end() <= storage.size();
        if self.layer.data_capabilities().discard == Offload::Unavailable || !is_inside {
            return Ok(());
        }
        match storage.discard_data(whole).await {
            Err(error) if error.kind() == ErrorKind::Unsupported => Ok(()),
            outcome => outcome,
        }
    }
}
