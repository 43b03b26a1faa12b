//! The log on standard error: warnings, and with `--verbose` what a person debugging wants to know.
//!
//! A server's event loops write to the log as well, and standard error may be a pipe that no process reads.
//! So `serve` has its lines written by a thread of their own (`queue`): a line costs a loop a copy, never a
//! wait, and lines beyond the queue's bound are dropped and counted. What one place in the code repeats is
//! limited in rate (`rate`), so that clients cannot flood the log. Lines that are waiting are written before
//! the process ends, for at most [`EXIT_LIMIT`], also when it ends by a panic.

mod queue;
mod rate;

use std::io;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use tracing::level_filters::LevelFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::Format;

use queue::Queue;
use rate::RateLimit;

/// How long the end of the process waits for a standard error that takes nothing.
const EXIT_LIMIT: Duration = Duration::from_secs(1);

/// The queue of this process, if its lines go by a thread.
static QUEUE: OnceLock<Queue> = OnceLock::new();

/// How lines get to standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// The thread that logs writes them.
    Direct,
    /// A thread of their own writes them: for processes with event loops that may not wait.
    Queued,
}

/// Starts the log of this process.
pub fn start(verbose: bool, delivery: Delivery) {
    let limit = RateLimit::shared();
    if delivery == Delivery::Queued {
        // Without a thread for it, lines go the direct way.
        if let Ok(queue) = Queue::start(|now| limit.take_summaries(now)) {
            let _ = QUEUE.set(queue);
            report_panics();
        }
    }
    let level = if verbose { LevelFilter::DEBUG } else { LevelFilter::INFO };
    tracing_subscriber::fmt()
        .with_max_level(level)
        .event_format(rate::Limited::new(
            Format::default().with_target(false).without_time(),
            limit,
        ))
        .with_writer(StandardError)
        .init();
}

/// Writes lines to standard error, in order with those of the log.
pub fn write(lines: &[u8]) {
    match QUEUE.get() {
        Some(queue) => queue.push(lines),
        None => queue::write_to_standard_error(lines),
    }
}

/// Writes what waits, for at most [`EXIT_LIMIT`]. Not for event loops that serve.
pub fn flush() {
    if let Some(queue) = QUEUE.get() {
        queue.flush(EXIT_LIMIT);
    }
}

/// Writes what waits and counts of what was left out, for at most [`EXIT_LIMIT`]: to be called before the
/// process ends.
pub fn finish() {
    let summaries = RateLimit::shared().take_all_summaries(Instant::now());
    if !summaries.is_empty() {
        write(summaries.as_bytes());
    }
    flush();
}

/// Has panics told in the log, and the log written before the process aborts. The usual report would wait for
/// a standard error that takes nothing.
fn report_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("a thread").to_owned();
        let trace = std::backtrace::Backtrace::capture();
        let trace = match trace.status() {
            std::backtrace::BacktraceStatus::Captured => format!("\n{trace}"),
            _ => String::new(),
        };
        write(format!("blockhouse: thread {name}: {panic}{trace}\n").as_bytes());
        finish();
    }));
}

/// Where the formatted lines go.
struct StandardError;

impl<'a> MakeWriter<'a> for StandardError {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        Self
    }
}

impl io::Write for StandardError {
    /// Never fails: there is no other place to report it.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        write(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
