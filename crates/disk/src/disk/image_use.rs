//! What is in flight on an image: where another image has taken its place, its storage is closed after that.
//!
//! Reads, flushes and the ends of durable changes go on at the image that they began at. A storage that gives something back when
//! it is closed, such as a lock on another host, fails them from then on. Others cost nothing here.

use blockhouse_core::Storage;
use blockhouse_core::sync::{EpochGuard, Epochs};
use blockhouse_format::Format;

use crate::durability::FlushTracker;

/// See the module's page.
pub(super) struct ImageUses(Option<Box<Epochs>>);

impl ImageUses {
    /// Of an image that nothing uses yet.
    pub(super) fn new<S: Storage>(format: &Format<FlushTracker<S>>) -> Self {
        let needs_close = format.storage().needs_close() || format.data().needs_close();
        Self(needs_close.then(Box::default))
    }

    /// Keeps the image's storage open until the guard is dropped. `None`: it stays open.
    pub(super) fn begin(&self) -> Option<EpochGuard<'_>> {
        self.0.as_ref().map(|epochs| epochs.enter())
    }

    /// Waits until what is in flight now has ended.
    pub(super) async fn ended(&self) {
        if let Some(epochs) = &self.0 {
            epochs.synchronize().await;
        }
    }
}
