//! Flushes and durable writes whose future was dropped before they completed.
//!
//! A storage server (NBD, Ceph) may report the failure of a flush or durable write only once. A
//! dropped future does not see it, so the next flush waits until all detached requests have ended,
//! and fails if one of them failed.

use blockhouse_core::sync::Condvar;
use blockhouse_core::{Error, Result};
use parking_lot::Mutex;

/// The detached requests of a storage.
#[derive(Default)]
pub(crate) struct DetachedSyncs {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    in_flight: usize,
    failure: Option<Error>,
}

impl DetachedSyncs {
    /// Records a request whose future was dropped.
    pub(crate) fn detach(&self) {
        self.state.lock().in_flight += 1;
    }

    /// Records the end of a detached request, and its failure if any.
    pub(crate) fn complete(&self, failure: Option<Error>) {
        let mut state = self.state.lock();
        state.in_flight -= 1;
        if let Some(error) = failure {
            state.failure.get_or_insert(error);
        }
        drop(state);
        self.ended.notify_all();
    }

    /// Waits until no detached request is in flight.
    ///
    /// # Errors
    /// The first error of a detached request since the last report. Each error is reported once.
    pub(crate) async fn drained(&self) -> Result<()> {
        self.ended
            .wait_until(|| {
                let mut state = self.state.lock();
                (state.in_flight == 0).then(|| state.failure.take().map_or(Ok(()), Err))
            })
            .await
    }
}
