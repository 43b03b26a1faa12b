//! Work that may block runs on its own thread, so that no event loop waits for it: listening (which
//! probes for a running server), the end of a guest's device, and questions to the file systems of
//! images.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use async_lock::Semaphore;
use blockhouse_engine::timeout;
use futures_channel::oneshot;

/// How long a file system may take to answer.
const MAX_ANSWER_TIME: Duration = Duration::from_secs(2);
/// The maximum number of threads that ask: those that a file system holds up are lost.
const MAX_QUESTIONS: usize = 4;

/// Runs `work` on a thread of its own, and waits for its outcome.
///
/// # Errors
/// The host has no further thread, or the work panicked.
pub(crate) async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let (done, outcome) = oneshot::channel();
    let builder = std::thread::Builder::new().name("blockhouse-work".into());
    // The caller's future may have been dropped.
    builder.spawn(move || drop(done.send(work()))).context("cannot start a thread")?;
    outcome.await.context("a thread ended badly")
}

/// Questions to file systems, any of which may hang.
pub(crate) struct Questions(Arc<Semaphore>);

impl Default for Questions {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_QUESTIONS)))
    }
}

impl Questions {
    /// Runs `ask` on a thread of its own, and waits for its outcome, but not for a file system that
    /// hangs.
    ///
    /// # Errors
    /// As [`run`]; or `ask`, with the wait for a thread, takes longer than `MAX_ANSWER_TIME`.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        ask: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        let answer = async {
            let permit = self.0.acquire_arc().await;
            run(move || {
                let answer = ask();
                drop(permit);
                answer
            })
            .await
        };
        let answer = timeout(MAX_ANSWER_TIME, answer).await;
        answer.context("the file system of an image does not answer")?
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use blockhouse_engine::{EngineChoice, EventLoop};
    use futures_util::future::join_all;

    use super::*;

    #[test]
    fn questions_that_hang_keep_neither_the_loop_nor_more_threads_than_allowed() {
        EventLoop::new(EngineChoice::Auto).expect("a loop").block_on(async {
            let (questions, mut releases) = (Questions::default(), Vec::new());
            assert_eq!(questions.run(|| 7).await.expect("an answer"), 7);
            let hanging = (0..MAX_QUESTIONS).map(|_| {
                let (release, released) = channel::<()>();
                releases.push(release);
                questions.run(move || released.recv().is_err())
            });
            let outcomes = join_all(hanging).await;
            assert!(outcomes.iter().all(Result::is_err), "{outcomes:?}");
            assert!(questions.run(|| 9).await.is_err(), "no thread is free");
            drop(releases);
            assert_eq!(questions.run(|| 8).await.expect("an answer"), 8);
        });
    }
}
