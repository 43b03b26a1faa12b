//! The log on standard error: warnings, and with `--verbose` lines for debugging.
//!
//! A server's lines begin with the time, unless standard error is a stream to systemd's journal. In
//! that case the lines are sent to the journal with their fields (`journal`). With `--log-format
//! json` every line is a JSON object, also in the journal (`line`).
//!
//! A server's event loops write to the log as well, and standard error may be a pipe that no
//! process reads. So a separate thread writes the lines of `serve` (`queue`): a loop only copies a
//! line and never waits, and lines beyond the queue's bound are dropped and counted. The lines of
//! each call site are limited in rate (`rate`), so that clients cannot flood the log. Before the
//! process ends, also by a panic, it writes the waiting lines for at most [`EXIT_LIMIT`].

mod journal;
mod line;
mod queue;
mod rate;

use std::io;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use tracing::Level;
use tracing_subscriber::fmt::MakeWriter;

use journal::Journal;
pub use line::visible;
use line::{Line, LineFormat};
use queue::Queue;
use rate::RateLimit;

/// How long the process waits at its end if standard error is blocked.
const EXIT_LIMIT: Duration = Duration::from_secs(1);

/// The queue of this process, if a separate thread writes its lines.
static QUEUE: OnceLock<Queue> = OnceLock::new();
/// The form of lines.
static FORMAT: OnceLock<LineFormat> = OnceLock::new();

/// How lines are written to standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// The thread that logs writes them.
    Direct,
    /// A separate thread writes the lines. For processes whose event loops must not block.
    Queued,
}

/// The form of the log on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// A JSON object in each line.
    Json,
}

/// Starts the log of this process, with lines at least as severe as `level`.
pub fn start(level: Level, format: LogFormat, delivery: Delivery) {
    let limit = RateLimit::shared();
    let format = match (format, delivery) {
        (LogFormat::Json, _) => LineFormat::Json,
        (LogFormat::Text, Delivery::Direct) => LineFormat::Plain,
        (LogFormat::Text, Delivery::Queued) => LineFormat::Timed,
    };
    let format = match delivery {
        Delivery::Direct => format,
        Delivery::Queued => start_queue(format, limit),
    };
    let _ = FORMAT.set(format);
    tracing_subscriber::fmt()
        .with_max_level(level)
        .event_format(rate::Limited::new(format, limit))
        .with_writer(StandardError)
        .init();
}

/// Starts the thread that writes lines. Returns the format of lines for the thread, or for direct
/// writes if no thread can be started.
fn start_queue(format: LineFormat, limit: &'static RateLimit) -> LineFormat {
    let summaries = |now| limit.take_summaries(now);
    let journal = (format == LineFormat::Timed).then(Journal::of_standard_error).flatten();
    let (own, queue) = match journal {
        // The journal's entries are made from JSON lines.
        Some(journal) => {
            let write = move |lines: &[u8]| journal.send(lines);
            (LineFormat::Json, Queue::start(LineFormat::Json, summaries, write))
        }
        None => (format, Queue::start(format, summaries, queue::write_to_standard_error)),
    };
    match queue {
        Ok(queue) => {
            let _ = QUEUE.set(queue);
            report_panics();
            own
        }
        Err(_) => format,
    }
}

/// Writes a message to standard error, in order with the log: as plain text, or as a line of the
/// log if the log is JSON.
pub fn tell(text: &str, level: Level) {
    match FORMAT.get() {
        Some(LineFormat::Json) => {
            let line = Line::of_log(level, text.to_owned());
            write(line.render(LineFormat::Json).as_bytes());
        }
        _ => write(format!("{text}\n").as_bytes()),
    }
}

/// Writes lines to standard error, in order with those of the log.
fn write(lines: &[u8]) {
    match QUEUE.get() {
        Some(queue) => queue.push(lines),
        None => queue::write_to_standard_error(lines),
    }
}

/// Writes the queued lines, for at most [`EXIT_LIMIT`]. Blocks, so event loops that serve must not
/// call it.
pub fn flush() {
    if let Some(queue) = QUEUE.get() {
        queue.flush(EXIT_LIMIT);
    }
}

/// Writes the queued lines and the counts of omitted ones, for at most [`EXIT_LIMIT`]. Called
/// before the process ends.
pub fn finish() {
    let format = FORMAT.get().copied().unwrap_or(LineFormat::Plain);
    for line in RateLimit::shared().take_all_summaries(Instant::now()) {
        write(line.render(format).as_bytes());
    }
    flush();
}

/// Makes panics be reported in the log, and the log be written before the process aborts. The
/// default report would block if standard error is blocked.
fn report_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("a thread").to_owned();
        let trace = std::backtrace::Backtrace::capture();
        let trace = match trace.status() {
            std::backtrace::BacktraceStatus::Captured => format!("\n{trace}"),
            _ => String::new(),
        };
        tell(&format!("blockhouse: thread {name}: {panic}{trace}"), Level::ERROR);
        finish();
    }));
}

/// The writer that gets the formatted lines.
struct StandardError;

impl<'a> MakeWriter<'a> for StandardError {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        Self
    }
}

impl io::Write for StandardError {
    /// Never fails, because there is no other place to report an error.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        write(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
