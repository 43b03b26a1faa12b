//! Allocates space for a part of a disk without sending zeros: the storage writes the zeros itself
//! (`Storage::prepare_zeroes`), or reserves the space (`Storage::write_zeroes` that keeps the
//! space), or makes holes (`Storage::write_zeroes` that may give space back).
//!
//! The steps are the steps of a write, but the storage makes the zeros. Ranges that the storage
//! refuses, or that are not whole clusters and blocks, are left to the caller.

use blockhouse_core::{
    Buffer, ByteRange, Durability, Error, ErrorKind, ExtentState, Offload, Result, Storage, Unmap,
    WorkBudget,
};
use blockhouse_format::{Intent, SpaceMode};

use super::Writer;

impl<S: Storage> Writer<S> {
    /// Allocates the space of `range`, which reads as zeros before and after; returns the rest,
    /// which begins with the first byte that got no space here. The caller has the claim.
    ///
    /// # Errors
    /// As a write; `Unsupported` if `mode` is not `Full`, and the storage cannot do it.
    pub(crate) async fn take_space(&self, range: ByteRange, mode: SpaceMode) -> Result<ByteRange> {
        let budget = WorkBudget::new();
        let block = self.layer.block_size();
        // A last cluster that the range covers only in part is left out, so that the whole clusters
        // before it still get their space.
        let unit = self.layer.format().cluster_size().unwrap_or(1);
        let end = range.end() / unit * unit;
        let mut rest = range;
        while rest.offset() < end && self.can_take_space(mode)? {
            let mut extent =
                self.prepare(ByteRange::between(rest.offset(), end), Intent::Write).await?;
            let ExtentState::Mapped { host } = extent.state else {
                return Err(self.layer.misplaced(&extent));
            };
            let length = extent.guest.length();
            let place = ByteRange::between(host, host + length);
            if extent.alloc_range != extent.guest || !place.is_aligned(block) {
                break;
            }
            extent.begin_io();
            let outcome = self.take_host_space(place, mode).await;
            if mode == SpaceMode::Full
                && outcome.as_ref().is_err_and(|error| error.kind() == ErrorKind::Unsupported)
            {
                extent.end_io();
                break;
            }
            extent.complete(outcome, Durability::None).await?;
            rest = rest.skip(length);
            budget.spend(WorkBudget::LOOK_UP).await;
        }
        Ok(rest)
    }

    fn can_take_space(&self, mode: SpaceMode) -> Result<bool> {
        let capabilities = self.layer.data_capabilities();
        match mode {
            SpaceMode::Full => Ok(capabilities.prepare_zeroes == Offload::Available),
            _ if capabilities.write_zeroes == Offload::Available => Ok(true),
            _ => Err(self.cannot_set_aside(mode)),
        }
    }

    async fn take_host_space(&self, place: ByteRange, mode: SpaceMode) -> Result<()> {
        let data = self.layer.data();
        if mode == SpaceMode::Full {
            return data.prepare_data_zeroes(place, Buffer::new(0).lend()).await;
        }
        // New space may be past the end of the file, and a zero write there would change nothing.
        if place.end() > data.size() {
            data.extend_hint(place.end()).await;
        }
        if place.end() <= data.size() {
            let is_hole = mode == SpaceMode::Tables;
            let unmap = if is_hole { Unmap::Allowed } else { Unmap::Forbidden };
            data.write_data_zeroes(place, unmap).await
        } else {
            Err(self.cannot_set_aside(mode))
        }
    }

    fn cannot_set_aside(&self, mode: SpaceMode) -> Error {
        let what = match mode {
            SpaceMode::Tables => "the storage has no holes that read as zeros",
            _ => "the storage cannot set space aside",
        };
        Error::new(ErrorKind::Unsupported, what).on(self.layer.name())
    }
}
