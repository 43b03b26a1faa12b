//! The requests in flight on an image. After an image was replaced, its storage is closed when
//! these requests have ended.
//!
//! Reads, flushes and the ends of durable changes continue on the image on which they began. A
//! storage that releases something when it is closed, such as a lock on another host, fails
//! operations from then on. So such a storage is closed after its operations in flight, and every
//! request to it holds a guard. Other storages stay open, and their requests need no guard.

use blockhouse_core::Storage;
use blockhouse_core::sync::{EpochGuard, Epochs};

use crate::layer::Layer;

/// See the module's page.
pub(crate) struct ImageUses(Option<Box<Epochs>>);

/// Keeps the image and its chain open during a request.
pub(crate) type UseGuard<'a> = Option<EpochGuard<'a>>;

impl ImageUses {
    /// The uses of an image that is not in use yet, with its present backing files. If a backing
    /// file is replaced later, the new one is on the same storage.
    pub(super) fn new<S: Storage>(layer: &Layer<S>) -> Self {
        let needs_close = layer.layers().any(|layer| {
            let format = layer.format();
            format.storage().needs_close() || format.data().needs_close()
        });
        Self(needs_close.then(Box::default))
    }

    /// Keeps the image and its backing chain open until the guard is dropped. `None`: the image and
    /// its chain stay open anyway.
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
