//! Changes without data: zero writes and discards.
//!
//! Whole blocks go down by the storage's own operation where it has one. Zeros are otherwise written
//! by hand, in pieces from one buffer, unless the request is for the quick way only; a discard that
//! the storage does not have is no failure, since it is a hint. What a zero write covers of a block
//! in part is written like any unaligned data. Extents are changed one after the other, and long
//! requests yield between them (see [`WorkBudget`]).

use blockhouse_core::{
    Buffer, ByteRange, Capabilities, Durability, Error, ErrorKind, ExtentState, Fallback, Offload,
    Result, Storage, Unmap, WorkBudget,
};
use blockhouse_format::{Intent, MetadataSync};

use crate::Disk;
use crate::durable::{Debt, Plan};
use crate::limits::PIECE;
use crate::prepared::Prepared;
use crate::tracker::Claim;

/// How a zero write may go.
#[derive(Clone, Copy)]
pub(crate) struct Zeroing {
    pub(crate) unmap: Unmap,
    pub(crate) fallback: Fallback,
    pub(crate) durability: Durability,
}

impl<S: Storage> Disk<S> {
    /// Makes `range` read as zeros: whole blocks first, because only they can be refused, then
    /// what is left at the edges. `claim` covers all blocks of the range.
    pub(crate) async fn write_zeroes(
        &self,
        range: ByteRange,
        how: Zeroing,
        claim: &Claim<'_>,
    ) -> Result<Debt> {
        let Some(middle) = range.align_inward(u64::from(self.alignment.offset)) else {
            if how.fallback == Fallback::Forbidden {
                return Err(self.no_fast_zeroes(range.offset()));
            }
            return self.write_few_zeroes(range, how.durability, claim).await;
        };
        let head = ByteRange::between(range.offset(), middle.offset());
        let tail = ByteRange::between(middle.end(), range.end());
        let mut debt = self.zero_blocks(middle, how).await?;
        for edge in [head, tail] {
            debt = debt.and(self.write_few_zeroes(edge, how.durability, claim).await?);
        }
        Ok(debt)
    }

    async fn zero_blocks(&self, range: ByteRange, mut how: Zeroing) -> Result<Debt> {
        let budget = WorkBudget::new();
        let mut debt = Debt::Nothing;
        let mut rest = range;
        while !rest.is_empty() {
            let extent = self.prepare(rest, Intent::Zero(how.unmap)).await?;
            rest = rest.skip(extent.guest.length());
            debt = debt.and(self.zero_extent(extent, how).await?);
            // Something has changed: it is too late to refuse.
            how.fallback = Fallback::Allowed;
            budget.spend(WorkBudget::LOOK_UP).await;
        }
        Ok(debt)
    }

    pub(crate) async fn zero_extent(
        &self,
        mut extent: Prepared<'_, S>,
        how: Zeroing,
    ) -> Result<Debt> {
        match extent.state {
            ExtentState::Mapped { host } => {
                let place = ByteRange::between(host, host + extent.guest.length());
                // What is copied around it goes down plainly.
                let by_flush = || MetadataSync::Flush;
                let extents = [&*extent].into_iter();
                let plan = Plan::for_writes(how.durability, self.fua(), extents, by_flush);
                let copied = self.copy_around(&mut extent, host).await;
                extent.set_moving();
                let outcome = match copied {
                    Ok(()) => self.zero_place(place, how, plan).await,
                    Err(error) => Err(error),
                };
                extent.settle(outcome, Durability::None).await
            }
            ExtentState::Zero | ExtentState::Hole => {
                let debt = Debt::of_tables(how.durability, self.fua());
                extent.settle(Ok(debt), Durability::Data).await
            }
            ExtentState::Compressed { .. } | ExtentState::Backing => Err(self.misplaced(&extent)),
        }
    }

    /// Makes a place of the storage read as zeros. `plan` is for zeros written by hand.
    async fn zero_place(&self, host: ByteRange, how: Zeroing, plan: Plan) -> Result<Debt> {
        let Capabilities { write_zeroes, fua, .. } = self.storage().capabilities();
        let afterwards = Plan::without_fua(how.durability, fua);
        // New space may lie past the end, where a zero write would be no write at all.
        let is_inside = host.end() <= self.storage().size();
        if write_zeroes == Offload::Available && is_inside {
            match self.storage().write_zeroes(host, how.unmap).await {
                Err(error) if error.kind() == ErrorKind::Unsupported => {}
                outcome => return outcome.map(|()| afterwards.debt()),
            }
        }
        if how.fallback == Fallback::Forbidden {
            return Err(self.no_fast_zeroes(host.offset()));
        }
        // Several pieces are cheaper with one flush for all than with FUA each.
        let plan = if host.length() <= PIECE as u64 { plan } else { afterwards };
        let mut zeros = self.bounce_buffers.get(host.length().min(PIECE as u64) as usize).await?;
        zeros.bytes_mut().fill(0);
        let mut rest = host;
        while !rest.is_empty() {
            let piece = rest.truncate(PIECE as u64);
            let vector = zeros.lend_range(0, piece.length() as usize);
            self.storage().write(piece.offset(), vector, plan.of_each_write()).await?;
            rest = rest.skip(piece.length());
        }
        Ok(plan.debt())
    }

    /// Writes zeros to a range of less than two blocks.
    async fn write_few_zeroes(
        &self,
        range: ByteRange,
        durability: Durability,
        claim: &Claim<'_>,
    ) -> Result<Debt> {
        if range.is_empty() {
            return Ok(Debt::Nothing);
        }
        let zeros = Buffer::try_new(range.length() as usize)?.lend();
        self.write_bounced(range, zeros, durability, claim).await
    }

    /// The refusal of a zero write for which only a quick way was welcome.
    pub(crate) fn no_fast_zeroes(&self, offset: u64) -> Error {
        let what = "writing zeros is no faster than writing data";
        Error::new(ErrorKind::Unsupported, what).on(self.name()).at(offset)
    }

    /// Gives the space of `range` back, as far as the storage can.
    pub(crate) async fn discard(&self, range: ByteRange, durability: Durability) -> Result<Debt> {
        let budget = WorkBudget::new();
        let mut debt = Debt::of_tables(durability, self.fua());
        let mut rest = range;
        while !rest.is_empty() {
            let mut extent = self.prepare(rest, Intent::Discard).await?;
            rest = rest.skip(extent.guest.length());
            match extent.state {
                ExtentState::Mapped { host } => {
                    let place = ByteRange::between(host, host + extent.guest.length());
                    extent.set_moving();
                    let outcome = self.discard_place(place).await;
                    extent.settle(outcome, Durability::None).await?;
                    debt = debt.and(Plan::without_fua(durability, self.fua()).debt());
                }
                _ => extent.settle(Ok(()), Durability::Data).await?,
            }
            budget.spend(WorkBudget::LOOK_UP).await;
        }
        Ok(debt)
    }

    async fn discard_place(&self, host: ByteRange) -> Result<()> {
        let storage = self.storage();
        let block = u64::from(storage.capabilities().alignment.offset);
        let Some(whole) = host.align_inward(block) else { return Ok(()) };
        let is_inside = whole.end() <= storage.size();
        if storage.capabilities().discard == Offload::Unavailable || !is_inside {
            return Ok(());
        }
        match storage.discard(whole).await {
            Err(error) if error.kind() == ErrorKind::Unsupported => Ok(()),
            outcome => outcome,
        }
    }
}
