//! An overlay over the image that a disk is using: see *Forks* in README.md of crates/images.
//!
//! Guarantees: no read of an overlay begins before the last change of the image below has ended;
//! the caller ensures this. A flush of the overlay also covers changes that the image below
//! acknowledged before.

use std::sync::{Arc, OnceLock};

use blockhouse_core::{Result, Storage};

use super::Image;
use super::uses::ImageUses;
use crate::layer::Layer;
use crate::options::{Access, Options};
use crate::write::Writer;

impl<S: Storage> Image<S> {
    /// Makes this new image an overlay over `lower`, the image of a disk. If `lower` is writable,
    /// this image must not be read or written before [`switch_to`](crate::QuiescedDisk::switch_to)
    /// has replaced the disk's image by an image over `lower`.
    #[must_use]
    pub fn over(mut self, lower: &Self) -> Self {
        if lower.access() == Access::ReadWrite {
            lower.layer().stability().set_unstable();
            self.layer().stability().set_unstable_behind();
        }
        self.layer().opened().set(Arc::clone(lower.layer()), Access::ReadOnly);
        self.sector_size = self.sector_size.max(lower.sector_size);
        self.uses = ImageUses::new(self.layer());
        self
    }

    /// As [`over`](Self::over), over an image that is open for reading only, with its backing
    /// chain.
    #[must_use]
    pub fn over_layer(mut self, layer: &Arc<Layer<S>>) -> Self {
        self.layer().opened().set(Arc::clone(layer), Access::ReadOnly);
        let sizes = layer
            .opened()
            .now()
            .chain([layer])
            .map(|one| one.format().header().logical_block_size());
        self.sector_size = sizes.fold(self.sector_size, u64::max);
        self.layer().claims().set_all(self.options.copy_on_read);
        self.uses = ImageUses::new(self.layer());
        self
    }

    /// Whether a backing file of the image has writes of this process that are not known to be
    /// durable.
    pub fn has_unstable_layer(&self) -> bool {
        self.layer().opened().are_unstable()
    }

    /// The depth below this image, and below `other`, of the first image that both read; `None` if
    /// they share no image.
    pub fn shared_with(&self, other: &Self) -> Option<(usize, usize)> {
        let theirs: Vec<_> =
            [other.layer()].into_iter().chain(other.layer().opened().now()).collect();
        (1..).zip(self.layer().opened().now()).find_map(|(depth, layer)| {
            let is_it = |one: &&Arc<Layer<S>>| Arc::ptr_eq(one, layer);
            Some((depth, theirs.iter().position(is_it)?))
        })
    }
}

/// A read-only image of a layer that another image is based on.
pub(crate) fn image_of_layer<S: Storage>(layer: &Arc<Layer<S>>) -> Image<S> {
    let sector_size = layer.format().header().logical_block_size();
    let options = Options { access: Access::ReadOnly, ..Options::default() };
    let (writer, uses) = (Writer::new(Arc::clone(layer)), ImageUses::new(layer));
    Image { writer, uses, options, sector_size, state: OnceLock::new() }
}

/// Makes an image durable that other images still read as a layer. Its storage stays open.
///
/// # Errors
/// Errors of the storage. Then flushes of the images over this one fail, because they flush it as
/// well.
pub(crate) async fn close_as_layer<S: Storage>(image: &Image<S>) -> Result<()> {
    image.format().close().await?;
    if let Some(state) = image.state() {
        state.close();
    }
    image.layer().stability().set_stable();
    Ok(())
}
