//! Backing files with writes of this process that no flush has covered: a fork leaves such a layer.
//!
//! Guarantee: a flush of an image also makes earlier writes to its backing files durable, and fails
//! if that fails. If all backing files are known to be stable, this costs one atomic load.

use std::sync::atomic::Ordering;

use blockhouse_core::{Result, Storage, SyncMode, rare};

use super::Layer;
use super::behind::OpenedLayers;
use super::stability::Stability;

impl<S: Storage> Layer<S> {
    /// Whether this layer and its backing files have writes that no flush has covered.
    pub fn stability(&self) -> &Stability {
        &self.stability
    }

    /// Flushes the image, and those of its backing files that are not stable yet.
    ///
    /// # Errors
    /// Errors of a storage.
    pub async fn flush(&self, sync: SyncMode) -> Result<()> {
        if !self.stability.is_behind_stable.load(Ordering::Acquire) {
            // Boxed, so that the future of the common path stays small.
            rare(self.opened().flush(sync)).await?;
        }
        self.format.flush(sync).await
    }
}

impl<'a, S: Storage> OpenedLayers<'a, S> {
    /// Whether any of these backing files is not known to be stable.
    pub(crate) fn are_unstable(self) -> bool {
        self.maybe_unstable().any(|layer| !layer.stability.is_stable())
    }

    /// As [`Layer::flush`], for the image's backing files only.
    ///
    /// # Errors
    /// Errors of a storage.
    pub(crate) async fn flush(self, sync: SyncMode) -> Result<()> {
        let mut are_stable = true;
        for layer in self.maybe_unstable() {
            if !layer.stability.is_stable() {
                are_stable = false;
                layer.format.flush(sync).await?;
            }
        }
        if are_stable {
            self.layer().stability.set_stable_behind();
        }
        Ok(())
    }

    /// The backing files that may have writes that no flush has covered.
    fn maybe_unstable(self) -> impl Iterator<Item = &'a Layer<S>> {
        let next = |layer: &'a Layer<S>| {
            if layer.stability.is_behind_stable.load(Ordering::SeqCst) {
                None
            } else {
                layer.backing_layer().map(|layer| &**layer)
            }
        };
        std::iter::successors(next(self.layer()), move |layer| next(layer))
    }
}
