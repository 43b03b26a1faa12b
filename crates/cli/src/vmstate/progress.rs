//! The progress of a copy, printed on standard error if that is a terminal.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// The interval between reports.
const PERIOD: Duration = Duration::from_millis(200);

/// The progress of a copy.
pub struct Progress {
    is_seen: bool,
    total: Option<u64>,
    done: u64,
    began: Instant,
    told: Instant,
}

impl Progress {
    /// The progress of a copy of `total` bytes, if that is known.
    pub fn new(total: Option<u64>) -> Self {
        let now = Instant::now();
        let is_seen = std::io::stderr().is_terminal();
        Self { is_seen, total, done: 0, began: now, told: now }
    }

    /// Counts bytes that are done.
    pub fn add(&mut self, bytes: usize) {
        self.done += bytes as u64;
        if self.is_seen && self.told.elapsed() >= PERIOD {
            self.told = Instant::now();
            self.tell("");
        }
    }

    /// Prints the last report.
    pub fn end(&self) {
        if self.is_seen {
            self.tell("\n");
        }
    }

    fn tell(&self, end: &str) {
        let mebibytes = |bytes: u64| bytes >> 20;
        let rate = self.done as f64 / self.began.elapsed().as_secs_f64() / f64::from(1 << 20);
        let of = self.total.map_or_else(String::new, |total| format!(" of {}", mebibytes(total)));
        // A failed write to the terminal does not fail the command.
        let _ =
            write!(std::io::stderr(), "\r{}{of} MiB, {rate:.0} MiB/s {end}", mebibytes(self.done));
    }
}
