//! How long a change of the whole disk waits for requests in flight, which may wait for a storage
//! that does not answer.

use std::future::pending;
use std::pin::pin;
use std::time::Duration;

use blockhouse_core::{Error, ErrorKind, Result, Storage};
use blockhouse_engine::{has_timers, sleep};
use futures_util::future::{Either, select};

use super::{Disk, QuiescedGuard};

/// The longest wait. During the wait, guests' changes may be held off.
const PATIENCE: Duration = Duration::from_secs(2);

/// Completes after [`PATIENCE`]; never outside of event loops, because only event loops have
/// timers.
async fn patience() {
    if has_timers() { sleep(PATIENCE).await } else { pending().await }
}

impl<S: Storage> Disk<S> {
    /// Holds the guest's changes off until the guard is dropped; waits for changes in flight.
    ///
    /// # Errors
    /// `Io` if a change takes too long. Then changes continue.
    pub(crate) async fn quiesce(&self) -> Result<QuiescedGuard<'_>> {
        self.quiesce.quiesce(patience()).await.ok_or_else(|| overdue(self, "changes"))
    }

    /// Waits for requests in flight, up to a limit.
    ///
    /// # Errors
    /// `Io` if they take too long.
    pub(crate) async fn patiently<T>(&self, requests: impl Future<Output = T>) -> Result<T> {
        match select(pin!(requests), pin!(patience())).await {
            Either::Left((outcome, _)) => Ok(outcome),
            Either::Right(_) => Err(overdue(self, "requests")),
        }
    }
}

fn overdue<S: Storage>(disk: &Disk<S>, requests: &str) -> Error {
    let cause = disk.stats().backing_wait().map_or_else(String::new, |wait| format!(": {wait}"));
    let what = format!("{requests} in flight have not ended in {PATIENCE:?}{cause}");
    Error::new(ErrorKind::Io, what).on(disk.name()).hint("try again when they have")
}
