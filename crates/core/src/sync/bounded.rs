//! Running futures concurrently, a bounded number at a time.

use std::cell::Cell;
use std::pin::pin;

use futures_util::stream::{self, Stream, StreamExt};

use crate::{Result, WorkBudget};

/// Runs the futures of a stream, at most `limit` at a time, and waits for all that were begun, even
/// if one fails.
///
/// A caller whose request must not access the disk or its memory after the reply relies on this.
/// After a failure `has_failed` is set, so that the stream can end; futures that it still yields
/// are run. Between completions other tasks run if `budget` is spent; the futures charge their work
/// to `budget`.
///
/// # Errors
/// The first one in order of completion.
pub async fn run_bounded<F: Future<Output = Result<()>>>(
    limit: usize,
    budget: &WorkBudget,
    has_failed: &Cell<bool>,
    futures: impl Stream<Item = F>,
) -> Result<()> {
    let mut running = pin!(futures.buffer_unordered(limit));
    let mut outcome = Ok(());
    while let Some(one) = running.next().await {
        has_failed.set(has_failed.get() || one.is_err());
        outcome = outcome.and(one);
        budget.yield_if_spent().await;
    }
    outcome
}

/// As [`run_bounded`], for futures that compute little. After a failure no further future is begun.
///
/// # Errors
/// The first one in order of completion.
pub async fn run_all<F: Future<Output = Result<()>>>(
    limit: usize,
    futures: impl IntoIterator<Item = F>,
) -> Result<()> {
    let has_failed = &Cell::new(false);
    let futures = futures.into_iter().take_while(|_| !has_failed.get());
    run_bounded(limit, &WorkBudget::new(), has_failed, stream::iter(futures)).await
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Waker};

    use super::*;
    use crate::{Error, ErrorKind, yield_now};

    /// Polls until the future is ready; counts the polls.
    fn finish<T>(future: impl Future<Output = T>) -> T {
        let mut future = pin!(future);
        for _ in 0..1000 {
            if let Poll::Ready(value) =
                future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
            {
                return value;
            }
        }
        panic!("it does not end");
    }

    #[test]
    fn no_more_than_the_limit_run_at_a_time_and_all_of_them_run() {
        let (running, most, ended) = (&Cell::new(0), &Cell::new(0), &Cell::new(0));
        let futures = (0..20).map(|number| async move {
            running.update(|count| count + 1);
            most.set(most.get().max(running.get()));
            for _ in 0..number % 3 {
                yield_now().await;
            }
            running.update(|count| count - 1);
            ended.update(|count| count + 1);
            Ok(())
        });
        assert!(finish(run_all(4, futures)).is_ok());
        assert_eq!((most.get(), ended.get(), running.get()), (4, 20, 0));
    }

    #[test]
    fn after_a_failure_what_was_begun_ends_and_no_more_begins() {
        let (begun, ended) = (&Cell::new(0), &Cell::new(0));
        let futures = (0..20).map(|number| async move {
            begun.update(|count| count + 1);
            if number == 1 {
                return Err(Error::new(ErrorKind::Io, "the second"));
            }
            yield_now().await;
            ended.update(|count| count + 1);
            if number == 2 { Err(Error::new(ErrorKind::NoSpace, "the third")) } else { Ok(()) }
        });
        let error = finish(run_all(4, futures)).expect_err("one fails");
        assert_eq!(error.kind(), ErrorKind::Io, "the first one counts");
        assert!((4..=5).contains(&begun.get()) && ended.get() == begun.get() - 1, "{begun:?}");
    }
}
