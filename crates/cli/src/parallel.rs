//! Work that several threads share, each on an event loop of its own, while this one shows the progress.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context, Result};
use blockhouse_engine::{EngineChoice, EventLoop};
use indicatif::{ProgressBar, ProgressStyle};

/// More threads than this only fight over the disk.
const MAX_THREADS: usize = 4;
/// How often the bar is drawn.
const BAR_INTERVAL: Duration = Duration::from_millis(100);

/// How many threads are worth while on this host.
pub fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS)
}

/// Calls `work` once on each of `threads` threads and waits for all of them. If standard error is a
/// terminal, a bar there shows what `progress` says: bytes done, and of how many.
///
/// # Errors
/// The first that any of them answers.
pub fn run_parallel<F: Future<Output = Result<()>>>(
    threads: usize,
    work: impl Fn() -> F + Sync,
    progress: impl Fn() -> (u64, u64),
) -> Result<()> {
    let bar = bar(progress().1);
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
            while let Err(RecvTimeoutError::Timeout) = all_ended.recv_timeout(BAR_INTERVAL) {
                bar.set_position(progress().0);
            }
        }
        running.into_iter().try_for_each(|thread| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    });
    bar.finish_and_clear();
    outcome
}

/// Invisible where standard error is no terminal.
fn bar(total: u64) -> ProgressBar {
    let look = "{percent:>3}% [{bar:40}] {binary_bytes} of {binary_total_bytes}  \
                {binary_bytes_per_sec}  {eta} left";
    let style = ProgressStyle::with_template(look).expect("a template of known words");
    ProgressBar::new(total).with_style(style.progress_chars("=> "))
}
