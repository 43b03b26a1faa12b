//! The observers of requests that the host failed.
//!
//! Guarantee: requests that succeed cost nothing here. The observer is called on the thread that
//! carried the request out, before the request's outcome is known to the export.

use std::sync::{Arc, OnceLock};

use blockhouse_core::{Error, Storage, errno};
use blockhouse_format::qcow2::BitmapLossObserver;

use super::Disk;
use crate::stats::Operation;

/// A request that failed because of the host or the image, not because it was invalid.
#[derive(Clone, Copy, Debug)]
pub struct FailedRequest<'a> {
    /// The request.
    pub operation: Operation,
    /// Why it failed.
    pub error: &'a Error,
    /// Whether a flush has failed since the disk was opened, so that written data may be lost.
    pub has_lost_flush: bool,
}

/// The callback for each [`FailedRequest`]. The callback must not wait.
pub type FailureObserver = Box<dyn Fn(&FailedRequest<'_>) + Send + Sync>;

/// The observers of a disk.
#[derive(Default)]
pub(super) struct Failures {
    requests: OnceLock<FailureObserver>,
    pub(super) bitmaps: OnceLock<BitmapLossObserver>,
}

impl<S: Storage> Disk<S> {
    /// Sets the observer of requests that the host fails from now on. Only the first call for a
    /// disk has an effect.
    pub fn observe_failures(&self, observer: FailureObserver) {
        // If the disk has an observer already, that one stays.
        let _ = self.failures.requests.set(observer);
    }

    /// Sets the observer of bitmaps that become coarser or are lost from now on, also in images
    /// that replace this one. Only the first call for a disk has an effect.
    pub fn observe_bitmap_losses(&self, observer: BitmapLossObserver) {
        if let Ok(bitmaps) = self.format().bitmaps() {
            bitmaps.observe_losses(Arc::clone(&observer));
        }
        // If the disk has an observer already, that one stays.
        let _ = self.failures.bitmaps.set(observer);
    }

    /// Reports a request that has failed.
    #[cold]
    pub(super) fn report_failure(&self, operation: Operation, error: &Error) {
        let Some(observer) = self.failures.requests.get() else { return };
        // EFAULT: the guest named memory that does not exist.
        let is_own_fault = error.errno() == errno::EFAULT || !error.is_host_failure();
        if !is_own_fault {
            let storages = [self.format().storage(), self.format().data()];
            let has_lost_flush = storages.iter().any(|storage| storage.failure().is_some());
            observer(&FailedRequest { operation, error, has_lost_flush });
        }
    }
}
