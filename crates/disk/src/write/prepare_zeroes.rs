//! Space for a part of a disk, filled with zeros that are written without being sent (`Storage::prepare_zeroes`).
//!
//! The same steps as for a write, but that the storage makes the data. What it refuses, and what is not whole in its
//! clusters and blocks, is left to a write of zeros.

use blockhouse_core::{
    Buffer, ByteRange, Durability, ErrorKind, ExtentState, Offload, Result, Storage, WorkBudget,
};
use blockhouse_format::Intent;

use super::Writer;

impl<S: Storage> Writer<S> {
    /// Prepares `range`, which reads as zeros before and after; what is left of it, from the first byte on that could
    /// not be. The caller has the claim.
    pub(crate) async fn prepare_zeroes(&self, range: ByteRange) -> Result<ByteRange> {
        let budget = WorkBudget::new();
        let block = self.layer.block_size();
        let mut rest = range;
        while !rest.is_empty()
            && self.layer.data_capabilities().prepare_zeroes == Offload::Available
        {
            let mut extent = self.prepare(rest, Intent::Write).await?;
            let ExtentState::Mapped { host } = extent.state else {
                return Err(self.layer.misplaced(&extent));
            };
            let length = extent.guest.length();
            let place = ByteRange::between(host, host + length);
            if extent.alloc_range != extent.guest || !place.is_aligned(block) {
                break;
            }
            extent.begin_io();
            let held = Buffer::new(0).lend();
            let outcome = self.layer.data().prepare_data_zeroes(place, held).await;
            if outcome.as_ref().is_err_and(|error| error.kind() == ErrorKind::Unsupported) {
                extent.end_io();
                break;
            }
            extent.complete(outcome, Durability::None).await?;
            rest = rest.skip(length);
            budget.spend(WorkBudget::LOOK_UP).await;
        }
        Ok(rest)
    }
}
