//! The next event for a job that has several operations in flight.

use std::future::{Future, pending};
use std::pin::pin;

use blockhouse_core::Result;
use blockhouse_engine::ClockSleep;
use futures_util::future::{Either, select};
use futures_util::stream::{FuturesUnordered, StreamExt};

/// Waits for the end of an operation, for `news`, or for the end of `sleep`. Returns the outcome of
/// the operation; `None` after another event.
pub(crate) async fn next_event(
    operations: &mut FuturesUnordered<impl Future<Output = Result<()>>>,
    news: impl Future<Output = ()>,
    sleep: Option<ClockSleep>,
) -> Option<Result<()>> {
    let wait = async {
        match sleep {
            Some(sleep) => drop(select(pin!(news), sleep).await),
            None => news.await,
        }
    };
    // An empty set has no event to wait for.
    let ended =
        async { if operations.is_empty() { pending().await } else { operations.next().await } };
    match select(pin!(ended), pin!(wait)).await {
        Either::Left((outcome, _)) => outcome,
        Either::Right(_) => None,
    }
}
