//! Futures with a time limit.

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use blockhouse_engine::sleep;
use futures_util::future::{Either, select};

/// Waits for the future, but not longer than `limit`: then the future is dropped.
pub async fn timeout<T>(limit: Duration, future: impl Future<Output = T>) -> Option<T> {
    match select(pin!(future), sleep(limit)).await {
        Either::Left((value, _)) => Some(value),
        Either::Right(_) => None,
    }
}
