//! Work that may block runs on its own thread, so that no event loop waits for it: listening (which
//! probes for a running server), the end of a guest's device, and questions to the file systems of
//! images.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use blockhouse_engine::timeout;
use futures_channel::oneshot;
use parking_lot::Mutex;

/// How long a file system may take to answer.
const MAX_ANSWER_TIME: Duration = Duration::from_secs(2);

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
///
/// Guarantees: no event loop waits for a file system, and none waits for another one. A file system
/// that hangs keeps one thread.
#[derive(Default)]
pub(crate) struct Questions(Mutex<HashMap<FileSystems, Arc<async_lock::Mutex<()>>>>);

/// The file systems that a question is for, by their numbers.
pub(crate) type FileSystems = [Option<u64>; 2];

impl Questions {
    /// Runs `ask` on a thread of its own, when no other question to these file systems is left, and
    /// waits for its outcome, but not for a file system that hangs.
    ///
    /// # Errors
    /// As [`run`]; or `ask`, with the wait for its turn, takes longer than `MAX_ANSWER_TIME`.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        file_systems: FileSystems,
        ask: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        let turns = Arc::clone(self.0.lock().entry(file_systems).or_default());
        let answer = async {
            let turn = turns.lock_arc().await;
            run(move || {
                let answer = ask();
                drop(turn);
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
    use futures_util::future::join;

    use super::*;

    #[test]
    fn a_file_system_that_hangs_keeps_one_thread_and_no_other_file_system() {
        const HANGING: FileSystems = [Some(1); 2];
        EventLoop::new(EngineChoice::Auto).expect("a loop").block_on(async {
            let questions = Questions::default();
            assert_eq!(questions.run(HANGING, || 7).await.expect("an answer"), 7);
            let (release, released) = channel::<()>();
            let hangs = questions.run(HANGING, move || released.recv().is_err());
            let others = async {
                for _ in 0..10 {
                    assert_eq!(questions.run([Some(2); 2], || 9).await.expect("an answer"), 9);
                }
            };
            assert!(join(hangs, others).await.0.is_err());
            let next = questions.run(HANGING, || panic!("asked beside a question that hangs"));
            assert!(next.await.is_err());
            drop(release);
            assert_eq!(questions.run(HANGING, || 8).await.expect("an answer"), 8);
        });
    }
}
