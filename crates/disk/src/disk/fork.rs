//! A disk that stands on the image of another one: see *Forks* in README.md of the crate.
//!
//! Guarantees: what stands on an image is read only from the moment on from which that image is
//! changed no more, which is the caller's to keep. A flush covers what the image had answered
//! before.

use std::sync::Arc;

use blockhouse_core::{Result, Storage, SyncMode};

use super::image_use::ImageUses;
use super::{Disk, ReplacedImage};
use crate::layer::Layer;
use crate::options::Access;

impl<S: Storage> Disk<S> {
    /// The same disk, whose image is new, over the image that requests of `lower` go to now. Where
    /// that may be changed, nothing reads this disk, and nothing is written to it, before
    /// [`switch_to`](super::QuiescedDisk::switch_to) has put an image over the same one in the
    /// place of that.
    #[must_use]
    pub fn over(mut self, lower: &Self) -> Self {
        let layer = lower.shared_layer();
        if lower.opened_access() == Access::ReadWrite {
            layer.set_unstable();
            self.layer().set_unstable_behind();
        }
        self.layer().set_backing(Arc::clone(layer), Access::ReadOnly);
        self.sector_size = self.sector_size.max(lower.current().sector_size);
        self.uses = ImageUses::new(self.writer.layer());
        self
    }

    /// Whether a layer behind the disk's image has writes of this process that are not known to be
    /// durable.
    pub fn has_unstable_layer(&self) -> bool {
        self.layer().has_unstable_behind()
    }

    /// The same disk, whose image is new here, over one that is open for reading only, with all
    /// that is behind that.
    #[must_use]
    pub(crate) fn over_layer(mut self, layer: &Arc<Layer<S>>) -> Self {
        self.layer().set_backing(Arc::clone(layer), Access::ReadOnly);
        let sizes = layer
            .layers_behind()
            .chain([layer])
            .map(|one| one.format().header().logical_block_size());
        self.sector_size = sizes.fold(self.sector_size, u64::max);
        self.uses = ImageUses::new(self.writer.layer());
        self
    }

    /// Where the first image behind the disk's own is that `other` reads as well: how many steps
    /// behind this disk's image, and how many behind that of `other`.
    pub fn shared_with(&self, other: &Self) -> Option<(usize, usize)> {
        let theirs: Vec<_> =
            [other.shared_layer()].into_iter().chain(other.layer().layers_behind()).collect();
        (1..).zip(self.layer().layers_behind()).find_map(|(depth, layer)| {
            let is_it = |one: &&Arc<Layer<S>>| Arc::ptr_eq(one, layer);
            Some((depth, theirs.iter().position(is_it)?))
        })
    }

    /// As [`close`](Self::close), of a disk that nothing was written to, whatever becomes of the
    /// layers behind it.
    ///
    /// # Errors
    /// As there.
    pub(crate) async fn close_alone(&self) -> Result<()> {
        self.own_layer().set_stable_behind();
        self.close().await
    }

    /// Makes durable what the layers behind the disk's image have that a fork left.
    ///
    /// # Errors
    /// What a storage answers.
    pub(super) async fn flush_layers(&self) -> Result<()> {
        self.own_layer().flush_behind(SyncMode::Data).await
    }
}

impl<S: Storage> ReplacedImage<'_, S> {
    /// The image.
    pub(crate) fn layer(&self) -> &Layer<S> {
        self.0.own_layer()
    }

    /// As [`close`](Self::close), of an image that is read on as a layer: it is stable then. Its
    /// storage stays open.
    ///
    /// # Errors
    /// What the storage answers: whoever stands on it flushes it on, and fails.
    pub async fn close_as_layer(&self) -> Result<()> {
        let disk = self.0;
        disk.own_layer().format().close().await?;
        if let Some(state) = disk.state.get() {
            state.close();
        }
        disk.own_layer().set_stable();
        Ok(())
    }
}
