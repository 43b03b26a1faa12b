//! Work that several threads share, each with its own event loop, while the calling thread shows
//! the progress.
//!
//! The calling thread's loop runs meanwhile, because the other threads also use connections that
//! were opened on it.

use anyhow::{Context, Result};
use blockhouse_engine::{EngineChoice, EventLoop, timeout};
use futures_channel::oneshot;

use crate::progress::{Display, INTERVAL, Progress};

/// Maximum number of threads. More would only compete for the disk.
const MAX_THREADS: usize = 4;

/// The number of threads for this host: two for each processor, at most `MAX_THREADS`. Reason: a
/// loop submits no I/O while it decompresses, and a busy host divides its processors among threads.
pub fn default_threads() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    (processors * 2).min(MAX_THREADS)
}

/// Calls `work` once on each of `threads` threads and waits for all of them, while `event_loop`
/// runs. `progress` shows the result of `position`: bytes done, and bytes in total.
///
/// # Errors
/// The first error of a call of `work`.
pub fn run_parallel<F: Future<Output = Result<()>>>(
    event_loop: &mut EventLoop,
    progress: &Progress,
    threads: usize,
    work: impl Fn() -> F + Sync,
    position: impl Fn() -> (u64, u64),
) -> Result<()> {
    run_displayed(event_loop, &progress.display(position().1), threads, work, position)
}

/// As [`run_parallel`], with an existing display.
///
/// # Errors
/// As [`run_parallel`].
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
                // No thread can be created (`ulimit -u`), so this thread does the work.
                Err(_) if running.is_empty() => return event_loop.block_on(work()),
                // The threads that were created do all the work.
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
