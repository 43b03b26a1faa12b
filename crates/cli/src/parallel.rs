//! Work that several threads share, each on an event loop of its own, while this one shows the progress.

use std::sync::mpsc::{RecvTimeoutError, channel};

use anyhow::{Context, Result};
use blockhouse_engine::{EngineChoice, EventLoop};

use crate::progress::{INTERVAL, Progress};

/// More threads than this only fight over the disk.
const MAX_THREADS: usize = 4;

/// How many threads are worth while on this host.
pub fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS)
}

/// Calls `work` once on each of `threads` threads and waits for all of them. `progress` shows what `position` says: bytes
/// done, and of how many.
///
/// # Errors
/// The first that any of them answers.
pub fn run_parallel<F: Future<Output = Result<()>>>(
    progress: &Progress,
    threads: usize,
    work: impl Fn() -> F + Sync,
    position: impl Fn() -> (u64, u64),
) -> Result<()> {
    let display = progress.display(position().1);
    let (work, (ended, all_ended)) = (&work, channel());
    let outcome = std::thread::scope(|scope| {
        let mut running = Vec::new();
        for _ in 0..threads.max(1) {
            let ended = ended.clone();
            let job = move || {
                let outcome = EventLoop::new(EngineChoice::Auto)
                    .context("no engine can be used here")
                    .and_then(|mut event_loop| event_loop.block_on(work()));
                // The receiver outlives all threads.
                let _ = ended.send(());
                outcome
            };
            let thread = std::thread::Builder::new().spawn_scoped(scope, job);
            match thread {
                Ok(thread) => running.push(thread),
                Err(error) if running.is_empty() => {
                    return Err(error).context("cannot start a thread");
                }
                // Fewer threads do the same work.
                Err(_) => break,
            }
        }
        for _ in 0..running.len() {
            while let Err(RecvTimeoutError::Timeout) = all_ended.recv_timeout(INTERVAL) {
                display.show(position());
            }
        }
        running.into_iter().try_for_each(|thread| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    });
    display.end(outcome.is_ok());
    outcome
}
