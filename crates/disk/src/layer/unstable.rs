//! Images behind this one with writes of this process that no flush has covered: a fork leaves such
//! a layer.
//!
//! Guarantee: a flush of an image makes all that was written before to the layers behind it
//! durable, as long as one of them is not known to be stable, and fails where that fails. Where all
//! are, it costs one atomic load.

use std::sync::atomic::Ordering;

use blockhouse_core::{Result, Storage, SyncMode};

use super::Layer;

impl<S: Storage> Layer<S> {
    /// The image may have writes of this process that no flush has covered when others stand on it.
    pub(crate) fn set_unstable(&self) {
        self.is_stable.store(false, Ordering::SeqCst);
    }

    /// The image is durable, and is no longer changed.
    pub(crate) fn set_stable(&self) {
        self.is_stable.store(true, Ordering::SeqCst);
    }

    /// The image stands on one that may be unstable.
    pub(crate) fn set_unstable_behind(&self) {
        self.is_behind_stable.store(false, Ordering::SeqCst);
    }

    /// Every layer behind the image is stable: flushes of the image leave them out.
    pub(crate) fn set_stable_behind(&self) {
        self.is_behind_stable.store(true, Ordering::Release);
    }

    /// How many images are read through this one's layer in this process.
    pub(crate) fn stands(&self) -> usize {
        self.stands.load(Ordering::SeqCst)
    }

    /// Whether a layer behind this one is not known to be stable.
    pub(crate) fn has_unstable_behind(&self) -> bool {
        self.maybe_unstable().any(|layer| !layer.is_stable.load(Ordering::SeqCst))
    }

    /// Makes everything durable that the image has, and what those behind it have that are not
    /// stable yet.
    ///
    /// # Errors
    /// Errors of a storage.
    pub(crate) async fn flush(&self, sync: SyncMode) -> Result<()> {
        if !self.is_behind_stable.load(Ordering::Acquire) {
            // Boxed, so that the future of the common way stays small.
            Box::pin(self.flush_behind(sync)).await?;
        }
        self.format.flush(sync).await
    }

    /// As [`flush`](Self::flush), of the layers behind this one alone.
    ///
    /// # Errors
    /// Errors of a storage.
    pub(crate) async fn flush_behind(&self, sync: SyncMode) -> Result<()> {
        let mut are_stable = true;
        for layer in self.maybe_unstable() {
            if !layer.is_stable.load(Ordering::SeqCst) {
                are_stable = false;
                layer.format.flush(sync).await?;
            }
        }
        if are_stable {
            self.set_stable_behind();
        }
        Ok(())
    }

    /// The layers behind this one that a fork has left.
    fn maybe_unstable(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(self.layer_left(), |layer| layer.layer_left())
    }

    fn layer_left(&self) -> Option<&Self> {
        if self.is_behind_stable.load(Ordering::SeqCst) {
            None
        } else {
            self.backing_layer().map(|layer| &**layer)
        }
    }
}
