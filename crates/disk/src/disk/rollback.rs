//! Going back from a disk's image to the one behind it: see *Rollback* in README.md of the crate.
//!
//! Guarantee: no read that has looked something up in the image behind, as it was, is in flight
//! when that is changed again, unless its storage does not answer for long.

use std::sync::Arc;

use blockhouse_core::{ByteRange, ExtentState, Result, Storage};
use blockhouse_format::Intent;

use super::{Disk, QuiescedDisk, ReplacedImage};

impl<S: Storage> Disk<S> {
    /// Has the enabled bitmaps of `lower`, the image behind this disk's, say that what this disk's
    /// image has of its own changes, durably: so it does when the disk goes back. No change may
    /// be in flight.
    ///
    /// # Errors
    /// What a storage answers: bitmaps may say of some of it that it has changed.
    pub async fn note_own_parts_in(&self, lower: &Self) -> Result<()> {
        if !lower.format().has_bitmaps() {
            return Ok(());
        }
        let bitmaps = lower.format().bitmaps()?;
        let mut rest = ByteRange::between(0, self.size());
        while !rest.is_empty() {
            let extent = self.format().map(rest, Intent::Read).await?;
            let part = rest.truncate(extent.guest.length());
            if extent.state != ExtentState::Backing {
                bitmaps.record(part).await?;
            }
            rest = rest.skip(part.length());
        }
        Ok(())
    }
}

impl<'a, S: Storage> QuiescedDisk<'a, S> {
    /// As [`switch_to`](Self::switch_to), to an image that the replaced one stands on: it is
    /// changed only when reads that go through the replaced one have ended.
    ///
    /// # Errors
    /// As there.
    pub async fn go_back_to(self, lower: Arc<Disk<S>>) -> Result<ReplacedImage<'a, S>> {
        let (replaced, guard) = self.switch(lower)?;
        let image = replaced.0;
        if let Err(error) = image.patiently(image.own_layer().backing_reads_ended()).await {
            tracing::warn!("{error}; they may read what is written from now on");
        }
        drop(guard);
        Ok(replaced)
    }
}

impl<S: Storage> ReplacedImage<'_, S> {
    /// Has nothing outlive the process of an image that is gone.
    ///
    /// # Errors
    /// The host's.
    pub(crate) fn forget_state(&self) -> Result<()> {
        self.0.state.get().map_or(Ok(()), |state| state.remove())
    }
}
