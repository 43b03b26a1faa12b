//! The requests in flight on an image: where another image has taken its place, its storage is
//! closed after that.
//!
//! Reads, flushes and the ends of durable changes go on at the image that they began at. A storage
//! that gives something back when it is closed, such as a lock on another host, fails them from
//! then on; so it is closed after those in flight, and every request that goes to such a storage
//! keeps a guard. Others cost nothing here: they stay open.

use blockhouse_core::Storage;
use blockhouse_core::sync::{EpochGuard, Epochs};

use crate::layer::Layer;

/// See the module's page.
pub(crate) struct ImageUses(Option<Box<Epochs>>);

/// Keeps what was in use open.
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
