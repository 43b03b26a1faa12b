//! The progress of a long command.
//!
//! Guarantees: a bar is drawn if standard error is a terminal, unless `--quiet` forbids it.
//! Otherwise `-p` prints the lines of qemu-img on standard output: `    (12.34/100%)`, each line
//! over the previous one by a carriage return and a percent or more after it, and 100.00 only at a
//! successful end. If standard output carries a disk, these lines are printed on standard error.
//! Once a [`Progress`] exists, SIGUSR1 does not end the process but prints such a line on standard
//! error within a tenth of a second. A line that cannot be printed is omitted.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context, Result};
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};
use signal_hook::consts::SIGUSR1;

use crate::{called_as, output};

/// The interval at which the progress is displayed.
pub const INTERVAL: Duration = Duration::from_millis(100);
/// Percent between two lines, as in qemu-img.
const STEP: f64 = 1.0;

/// How progress is shown.
#[derive(clap::Args, Clone, Copy)]
pub struct ProgressArgs {
    /// Print the progress if standard error is no terminal: (12.34/100%) on standard output, as
    /// qemu-img does. A terminal shows a bar anyway. SIGUSR1 prints such a line on standard error,
    /// with or without this option.
    #[arg(short, long)]
    progress: bool,
}

/// The output for lines.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LinesTo {
    Output,
    Error,
}

/// Where progress is shown.
pub struct Progress {
    has_lines: bool,
    lines_to: LinesTo,
    is_asked: Arc<AtomicBool>,
}

impl Progress {
    /// Handles SIGUSR1 from now on.
    ///
    /// # Errors
    /// The kernel's.
    pub fn start(arguments: ProgressArgs) -> Result<Self> {
        let is_asked = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(SIGUSR1, Arc::clone(&is_asked)).context("SIGUSR1")?;
        Ok(Self { has_lines: arguments.progress, lines_to: LinesTo::Output, is_asked })
    }

    /// Under the name qemu-img: prints qemu-img's lines, one for each chunk that is a percent or
    /// more after the previous line. `None` if no lines are printed.
    pub fn lines_by_chunk(&self) -> Option<impl Fn(u64, u64) + Send + Sync + use<>> {
        let is_meant = self.prints_on_output() && called_as::is_qemu_img() && !output::is_quiet();
        let last = parking_lot::Mutex::new(0.0);
        (is_meant && bar(0).is_hidden()).then_some(move |done: u64, total: u64| {
            let mut last = last.lock();
            if let Some(percent) = percent(done, total).filter(|percent| *percent >= *last + STEP) {
                *last = percent;
                write(LinesTo::Output, &format!("{}\r", line(percent)));
            }
        })
    }

    /// A display of only the first and the last line. [`lines_by_chunk`](Self::lines_by_chunk)
    /// prints the lines between them.
    pub fn display_ends(&self, total: u64) -> Display<'_> {
        Display { has_steps: false, ..self.display(total) }
    }

    /// Lines go to standard error from now on, because standard output carries a disk.
    pub fn beside_output(self) -> Self {
        Self { lines_to: LinesTo::Error, ..self }
    }

    /// Runs `work` on this thread, while another thread shows the result of `position`: the bytes
    /// done, and the total, which is 0 while it is not known.
    pub fn beside<T>(
        &self,
        position: impl Fn() -> (u64, u64) + Sync,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let (end, ended) = channel::<()>();
        let (display, position) = (&self.display(position().1), &position);
        let outcome = std::thread::scope(|scope| {
            let show = move || {
                while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(INTERVAL) {
                    display.show(position());
                }
            };
            // If the thread cannot be started, only the display is missing.
            let _shown = std::thread::Builder::new().spawn_scoped(scope, show);
            let outcome = work();
            drop(end);
            outcome
        });
        display.end(outcome.is_ok());
        outcome
    }

    /// Whether lines go to standard output.
    pub fn prints_on_output(&self) -> bool {
        self.has_lines && self.lines_to == LinesTo::Output
    }

    /// The display of the progress of work of `total` bytes; 0 if the total is not known yet.
    pub fn display(&self, total: u64) -> Display<'_> {
        let bar = if output::is_quiet() { ProgressBar::hidden() } else { bar(total) };
        let has_lines = self.has_lines && bar.is_hidden() && !output::is_quiet();
        let display = Display {
            bar,
            lines: has_lines.then(|| parking_lot::Mutex::new(0.0)),
            lines_to: self.lines_to,
            has_steps: true,
            is_asked: &self.is_asked,
        };
        display.print(0.0);
        display
    }
}

/// Shows the progress of one piece of work.
pub struct Display<'a> {
    bar: ProgressBar,
    /// The percentage of the last line.
    lines: Option<parking_lot::Mutex<f64>>,
    lines_to: LinesTo,
    /// Whether lines are printed between the first and the last.
    has_steps: bool,
    is_asked: &'a AtomicBool,
}

impl Display<'_> {
    /// Shows the bytes that are done and the total, which is 0 if it is not known. Called once in
    /// each [`INTERVAL`].
    pub fn show(&self, (done, total): (u64, u64)) {
        if total > 0 && self.bar.length() != Some(total) {
            self.bar.set_length(total);
            self.bar.set_style(style(total));
        }
        self.bar.set_position(done);
        let percent = percent(done, total);
        if self.is_asked.swap(false, Ordering::Relaxed) {
            let line = percent.map_or_else(|| amount(done), line);
            self.bar.suspend(|| output::tell(&line));
        }
        if let (Some(last), Some(percent)) = (&self.lines, percent)
            && percent >= *last.lock() + STEP
            && percent < 100.0
            && self.has_steps
        {
            self.print(percent);
        }
    }

    /// Ends the display when the work has succeeded or failed.
    pub fn end(&self, is_good: bool) {
        self.bar.finish_and_clear();
        if self.is_asked.swap(false, Ordering::Relaxed) && is_good {
            output::tell(&line(100.0));
        }
        if is_good {
            self.print(100.0);
        }
        if self.lines.is_some() {
            write(self.lines_to, "\n");
        }
    }

    fn print(&self, percent: f64) {
        if let Some(last) = &self.lines {
            *last.lock() = percent;
            write(self.lines_to, &format!("{}\r", line(percent)));
        }
    }
}

/// Writes a line. A line that cannot be written is omitted.
fn write(to: LinesTo, text: &str) {
    let mut output: Box<dyn Write> = match to {
        LinesTo::Output => Box::new(std::io::stdout()),
        LinesTo::Error => Box::new(std::io::stderr()),
    };
    let _ = output.write_all(text.as_bytes()).and_then(|()| output.flush());
}

/// The percentage; `None` if the total is not known.
fn percent(done: u64, total: u64) -> Option<f64> {
    (total > 0).then(|| done.min(total) as f64 * 100.0 / total as f64)
}

fn line(percent: f64) -> String {
    format!("    ({percent:.2}/100%)")
}

/// As [`line()`], for an unknown total.
fn amount(done: u64) -> String {
    format!("    ({} so far)", HumanBytes(done))
}

/// The progress bar, which is hidden if standard error is no terminal.
fn bar(total: u64) -> ProgressBar {
    ProgressBar::new(total).with_style(style(total))
}

fn style(total: u64) -> ProgressStyle {
    let look = match total {
        0 => "{binary_bytes}  {binary_bytes_per_sec}",
        _ => {
            "{percent:>3}% [{bar:40}] {binary_bytes} of {binary_total_bytes}  \
             {binary_bytes_per_sec}  {eta} left"
        }
    };
    let style = ProgressStyle::with_template(look).expect("a template of known words");
    style.progress_chars("=> ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_those_of_qemu_img() {
        let shown = |done, total| percent(done, total).map(line);
        assert_eq!(shown(1234, 10_000).as_deref(), Some("    (12.34/100%)"));
        assert_eq!(shown(7, 5).as_deref(), Some("    (100.00/100%)"));
        // It is not known how much there is.
        assert_eq!(shown(7, 0), None);
        assert_eq!(amount(3 << 19), "    (1.50 MiB so far)");
    }
}
