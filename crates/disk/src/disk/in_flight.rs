//! A request that a disk is carrying out: `requests` has its steps.

use std::pin::Pin;

use blockhouse_core::Storage;

use super::Disk;
use crate::stats::Operation;

/// A request that is being carried out.
pub(super) struct RequestInFlight<'a, S: Storage> {
    pub(super) disk: &'a Disk<S>,
    pub(super) operation: Operation,
}

impl<S: Storage> Clone for RequestInFlight<'_, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: Storage> Copy for RequestInFlight<'_, S> {}

impl<S: Storage> RequestInFlight<'_, S> {
    /// Awaits `turn`, and measures the wait separately.
    pub(super) async fn wait<F: Future>(self, turn: Pin<&mut F>) -> F::Output {
        self.disk.request_stats().wait(self.operation, turn).await
    }
}
