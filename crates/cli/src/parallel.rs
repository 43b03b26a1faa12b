//! Work that several threads share, each on an event loop of its own, while this one shows the
//! progress.
//!
//! The loop of this thread runs meanwhile: connections that were made on it serve the others, too.

use anyhow::{Context, Result};
use blockhouse_engine::{EngineChoice, EventLoop, timeout};
use futures_channel::oneshot;

use crate::progress::{Display, INTERVAL, Progress};

/// More threads than this only fight over the disk.
const MAX_THREADS: usize = 4;

/// How many threads are worth while on this host: more than processors where these are few. Reason:
/// a loop that decompresses submits no I/O meanwhile, and a busy host shares its processors out by
/// threads.
pub fn default_threads() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    (processors * 2).min(MAX_THREADS)
}

/// Calls `work` once on each of `threads` threads and waits for all of them, while `event_loop`
/// runs. `progress` shows what `position` says: bytes done, and of how many.
///
/// # Errors
/// The first that any of them answers.
pub fn run_parallel<F: Future<Output = Result<()>>>(
    event_loop: &mut EventLoop,
    progress: &Progress,
    threads: usize,
    work: impl Fn() -> F + Sync,
    position: impl Fn() -> (u64, u64),
) -> Result<()> {
    run_displayed(event_loop, &progress.display(position().1), threads, work, position)
}

/// As [`run_parallel`], with a display that is there.
///
/// # Errors
/// As there.
pub fn run_displayed<F: Future<Output = Result<()>>>(
    event_loop: &mut EventLoop,
    display: &Display<'_>,
    threads: usize,
    work: impl Fn() -> F + Sync,
    position: impl Fn() -> (u64, u64),
) -> Result<()> {
    let work = &work;
    let outcome = std::thread::scope(|scope| {
        let mut running = Vec::new();
        for _ in 0..threads.max(1) {
            let (end, ended) = oneshot::channel::<()>();
            let job = move || {
                let _end = end;
                EventLoop::new(EngineChoice::Auto)
                    .context("no engine can be used here")
                    .and_then(|mut event_loop| event_loop.block_on(work()))
            };
            let thread = std::thread::Builder::new().spawn_scoped(scope, job);
            match thread {
                Ok(thread) => running.push((thread, ended)),
                // The process may have no more threads (`ulimit -u`): this one does the work.
                Err(_) if running.is_empty() => return event_loop.block_on(work()),
                // Fewer threads do the same work.
                Err(_) => break,
            }
        }
        event_loop.block_on(async {
            for (_, ended) in &mut running {
                while timeout(INTERVAL, &mut *ended).await.is_none() {
                    display.show(position());
                }
            }
        });
        running.into_iter().try_for_each(|(thread, _)| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    });
    display.end(outcome.is_ok());
    outcome
}
