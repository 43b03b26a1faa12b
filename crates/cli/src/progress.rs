//! How far a command is that takes long.
//!
//! Guarantees: a bar is drawn where standard error is a terminal, unless `--quiet` forbids it. Elsewhere `-p` prints on
//! standard output what qemu-img prints there: `    (12.34/100%)`, one over the other by carriage returns, each a percent
//! or more after the one before, and 100.00 at a good end only. From the moment that a [`Progress`] exists, SIGUSR1 ends
//! nothing but prints such a line on standard error, within a tenth of a second. What cannot be printed is left out.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use signal_hook::consts::SIGUSR1;

use crate::output;

/// How often it is looked at how far the work is.
pub const INTERVAL: Duration = Duration::from_millis(100);
/// Percent between two lines, as those of qemu-img.
const STEP: f64 = 1.0;

/// How progress is shown.
#[derive(clap::Args, Clone, Copy)]
pub struct ProgressArgs {
    /// Print how far it is where standard error is no terminal: (12.34/100%) on standard output, as qemu-img does.
    /// On a terminal a bar is drawn anyway. SIGUSR1 prints such a line on standard error, with or without this
    /// option.
    #[arg(short, long)]
    progress: bool,
}

/// Where progress is shown.
pub struct Progress {
    has_lines: bool,
    is_asked: Arc<AtomicBool>,
}

impl Progress {
    /// Takes SIGUSR1 from now on.
    ///
    /// # Errors
    /// The kernel's.
    pub fn start(arguments: ProgressArgs) -> Result<Self> {
        let is_asked = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(SIGUSR1, Arc::clone(&is_asked)).context("SIGUSR1")?;
        Ok(Self { has_lines: arguments.progress, is_asked })
    }

    /// Runs `work` on this thread, while another one shows what `position` says: bytes done, and of how many.
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
            // Without the thread the work is the same.
            let _shown = std::thread::Builder::new().spawn_scoped(scope, show);
            let outcome = work();
            drop(end);
            outcome
        });
        display.end(outcome.is_ok());
        outcome
    }

    /// What shows the progress of work of `total` bytes.
    pub fn display(&self, total: u64) -> Display<'_> {
        let bar = if output::is_quiet() { ProgressBar::hidden() } else { bar(total) };
        let has_lines = self.has_lines && bar.is_hidden() && !output::is_quiet();
        let display = Display {
            bar,
            lines: has_lines.then(|| parking_lot::Mutex::new(0.0)),
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
    is_asked: &'a AtomicBool,
}

impl Display<'_> {
    /// So many bytes are done, of so many. To be called each [`INTERVAL`].
    pub fn show(&self, (done, total): (u64, u64)) {
        self.bar.set_position(done);
        let percent = percent(done, total);
        if self.is_asked.swap(false, Ordering::Relaxed) {
            self.bar.suspend(|| output::tell(&line(percent)));
        }
        if let Some(last) = &self.lines
            && percent >= *last.lock() + STEP
        {
            self.print(percent);
        }
    }

    /// The work has ended, well or not.
    pub fn end(&self, is_good: bool) {
        self.bar.finish_and_clear();
        if self.is_asked.swap(false, Ordering::Relaxed) && is_good {
            output::tell(&line(100.0));
        }
        if is_good {
            self.print(100.0);
        }
        if self.lines.is_some() {
            let _ = output::write("");
        }
    }

    fn print(&self, percent: f64) {
        if let Some(last) = &self.lines {
            *last.lock() = percent;
            let mut output = std::io::stdout().lock();
            let _ = write!(output, "{}\r", line(percent)).and_then(|()| output.flush());
        }
    }
}

fn percent(done: u64, total: u64) -> f64 {
    if total == 0 { 100.0 } else { done.min(total) as f64 * 100.0 / total as f64 }
}

fn line(percent: f64) -> String {
    format!("    ({percent:.2}/100%)")
}

/// Invisible where standard error is no terminal.
fn bar(total: u64) -> ProgressBar {
    let look = "{percent:>3}% [{bar:40}] {binary_bytes} of {binary_total_bytes}  \
                {binary_bytes_per_sec}  {eta} left";
    let style = ProgressStyle::with_template(look).expect("a template of known words");
    ProgressBar::new(total).with_style(style.progress_chars("=> "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_those_of_qemu_img() {
        assert_eq!(line(percent(1234, 10_000)), "    (12.34/100%)");
        assert_eq!(line(percent(0, 0)), "    (100.00/100%)");
        assert_eq!(line(percent(7, 5)), "    (100.00/100%)");
    }
}
