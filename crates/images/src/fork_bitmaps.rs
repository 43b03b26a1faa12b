//! Bitmaps in a fork: the disk's bitmaps continue in its overlay, under their names, and the former
//! image, which is the layer below the overlay, keeps its own.
//!
//! Guarantees: a bitmap of the overlay never lacks a change. Until the layer is
//! [settled](crate::fork::Forked::settle) each enabled bitmap of the overlay marks the whole disk
//! as changed. After that it has the bits of the moment of the fork and of the later changes, as
//! without a fork; it has more bits if `MAX_MEMORY` makes the map of changes coarser. A crash
//! leaves one of these two states. The pause of a fork does not wait for bitmaps. A fork fails if
//! its overlay cannot get the bitmaps before the pause. It does not fail if they cannot be
//! completed after the pause.

use std::sync::Arc;

use blockhouse_core::{Result, SyncMode};
use blockhouse_format::{Bitmap, InheritedBits};
use blockhouse_storage::ImageStorage;

use blockhouse_disk::{
    ChangeObserver, DirtyMap, ImageDisk, ReplacedImage, StoredImage, quiesce_flushed,
};

/// Maximum memory, in bytes, for the map of changes until the layer is settled. So the map of a
/// large disk is coarser than its bitmaps, which then mark more than has changed.
const MAX_MEMORY: u64 = 64 << 20;

/// The enabled bitmaps of a disk's overlay until they are complete.
pub(crate) struct ForkedBitmaps {
    names: Vec<String>,
    changes: Arc<DirtyMap>,
}

/// Gives the unwritten overlay of a disk the bitmaps of the disk's image. Returns `None` if no
/// bitmap records changes, so that nothing has to be [completed](ForkedBitmaps::complete).
///
/// # Errors
/// The host's error.
pub(crate) async fn give_bitmaps(
    disk: &ImageDisk,
    overlay: &StoredImage,
) -> Result<Option<ForkedBitmaps>> {
    let (enabled, disabled) = usable_bitmaps(disk).await?;
    if enabled.is_empty() && disabled.is_empty() {
        return Ok(None);
    }
    let (theirs, ours) = (disk.format().bitmaps()?, overlay.format().bitmaps()?);
    if !disabled.is_empty() {
        ours.inherit(&theirs, &names(&disabled), InheritedBits::Exact(&|_| None)).await?;
    }
    let Some(finest) = enabled.iter().map(|bitmap| bitmap.granularity).min() else {
        return Ok(None);
    };
    let names = names(&enabled);
    ours.inherit(&theirs, &names, InheritedBits::All).await?;
    let least = DirtyMap::min_granularity(disk.size(), MAX_MEMORY);
    let changes = Arc::new(DirtyMap::new(disk.size(), finest.max(least))?);
    Ok(Some(ForkedBitmaps { names, changes }))
}

/// As [`give_bitmaps`], for an image without writers: its bitmaps are complete at once.
///
/// # Errors
/// As there.
pub(crate) async fn copy_bitmaps(disk: &ImageDisk, overlay: &StoredImage) -> Result<()> {
    let (mut all, disabled) = usable_bitmaps(disk).await?;
    all.extend(disabled);
    if all.is_empty() {
        return Ok(());
    }
    let (theirs, ours) = (disk.format().bitmaps()?, overlay.format().bitmaps()?);
    ours.inherit(&theirs, &names(&all), InheritedBits::Exact(&|_| None)).await
}

/// The bitmaps that record changes, and the disabled bitmaps. Bitmaps that lack changes are left
/// out.
async fn usable_bitmaps(disk: &ImageDisk) -> Result<(Vec<Bitmap>, Vec<Bitmap>)> {
    if !disk.format().has_bitmaps() {
        return Ok(Default::default());
    }
    let (lost, usable): (Vec<_>, Vec<_>) = disk
        .format()
        .bitmaps()?
        .list()
        .await?
        .into_iter()
        .partition(|bitmap| bitmap.is_inconsistent);
    for Bitmap { name, .. } in lost {
        tracing::warn!("{}: the bitmap {name:?} lacks changes, and does not go on", disk.name());
    }
    Ok(usable.into_iter().partition(|bitmap| bitmap.is_enabled))
}

fn names(bitmaps: &[Bitmap]) -> Vec<String> {
    bitmaps.iter().map(|bitmap| bitmap.name.clone()).collect()
}

impl ForkedBitmaps {
    /// The observer of all changes from the moment of the fork on.
    pub(crate) fn observer(&self) -> Arc<dyn ChangeObserver> {
        Arc::clone(&self.changes) as Arc<dyn ChangeObserver>
    }

    /// Completes the bitmaps: `layer` is the disk's former image, which no longer changes. Changes
    /// of the disk are held off meanwhile.
    ///
    /// # Errors
    /// Errors of the storage. The bitmaps then mark the whole disk as changed.
    pub(crate) async fn complete(
        &self,
        disk: &ImageDisk,
        layer: &ReplacedImage<'_, ImageStorage>,
    ) -> Result<()> {
        let _quiesced = quiesce_flushed(disk, SyncMode::Data).await?;
        disk.jobs().stop_observing(&self.observer());
        let theirs = layer.image().format().bitmaps()?;
        let next = |from| self.changes.next(from, u64::MAX);
        let bits = InheritedBits::Exact(&next);
        disk.format().bitmaps()?.inherit(&theirs, &self.names, bits).await
    }
}
