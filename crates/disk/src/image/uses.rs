//! The requests in flight on an image. After an image was replaced, its storage is closed when they
//! have ended.
//!
//! Reads, flushes and the ends of durable changes continue on the image on which they began. A
//! storage that releases something when it is closed, such as a lock on another host, fails
//! operations from then on. So it is closed after those in flight, and every request to such a
//! storage holds a guard. Other storages stay open, and their requests need no guard.

use blockhouse_core::Storage;
use blockhouse_core::sync::{EpochGuard, Epochs};

use crate::layer::Layer;

/// See the module's page.
pub(crate) struct ImageUses(Option<Box<Epochs>>);

/// Keeps the image and its chain open during a request.
pub(crate) type UseGuard<'a> = Option<EpochGuard<'a>>;

impl ImageUses {
    /// For an image that is not in use yet, with its present backing files. A later replacement of
    /// such a backing file is on the same storage.
    pub(super) fn new<S: Storage>(layer: &Layer<S>) -> Self {
        let needs_close = layer.layers().any(|layer| {
            let format = layer.format();
            format.storage().needs_close() || format.data().needs_close()
        });
        Self(needs_close.then(Box::default))
    }

    /// Keeps the image and its backing chain open until the guard is dropped. `None`: all of it
    /// stays open anyway.
    pub(crate) fn begin(&self) -> UseGuard<'_> {
        self.0.as_ref().map(|epochs| epochs.enter())
    }

    /// Waits until the operations in flight now have ended.
    pub(crate) async fn ended(&self) {
        if let Some(epochs) = &self.0 {
            epochs.synchronize().await;
        }
    }
}
