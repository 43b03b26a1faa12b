//! Ctrl-C and SIGTERM end a measurement between two requests, and its files are removed. A second
//! signal ends the process at once, even while it waits for requests; the files are removed then
//! too.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use blockhouse_daemon::stop_request::StopRequest;

/// The maximum number of attempts to remove the folder. An attempt fails if another thread adds a
/// file meanwhile.
const ATTEMPTS: usize = 5;

/// Whether a signal has asked the measurement to stop.
#[derive(Clone, Default)]
pub struct Stop(Arc<State>);

#[derive(Default)]
struct State {
    asked: OnceLock<StopRequest>,
    /// The folder to be removed.
    folder: OnceLock<PathBuf>,
}

impl Stop {
    /// Starts a thread that listens to the signals.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn on_signals() -> Result<Self> {
        let mut signals =
            Signals::new([SIGINT, SIGTERM]).context("cannot wait for signals to stop")?;
        let stop = Self::default();
        let told = stop.clone();
        let listen = move || {
            for _ in signals.forever() {
                let now = Instant::now();
                if !told.0.asked.get_or_init(|| StopRequest::at(now)).is_repeated_at(now) {
                    told.quit();
                }
            }
        };
        let thread = std::thread::Builder::new().name("signals".into()).spawn(listen);
        thread.context("cannot wait for signals to stop")?;
        Ok(stop)
    }

    /// Sets the folder that is removed if the process must end at once.
    pub fn removes(&self, folder: &Path) {
        self.0.folder.get_or_init(|| folder.to_owned());
    }

    /// Whether a signal has requested a stop.
    pub fn is_asked(&self) -> bool {
        self.0.asked.get().is_some()
    }

    /// Fails if a signal has requested a stop.
    ///
    /// # Errors
    /// The measurement was interrupted.
    pub fn check(&self) -> Result<()> {
        if self.is_asked() {
            bail!("interrupted; the files of the measurement are removed");
        }
        Ok(())
    }

    /// Ends the process without waiting for operations in progress.
    fn quit(&self) -> ! {
        match self.0.folder.get() {
            None => say("interrupted twice"),
            Some(folder) if (0..ATTEMPTS).any(|_| is_removed(folder)) => {
                say("interrupted twice; its files are removed");
            }
            Some(folder) => say(&format!(
                "interrupted twice; {}: could not be removed; remove it yourself",
                folder.display()
            )),
        }
        signal_hook::low_level::exit(1)
    }
}

fn is_removed(folder: &Path) -> bool {
    std::fs::remove_dir_all(folder).is_ok() || !folder.exists()
}

/// Prints a message, unless that would block, because other threads may be blocked on the same
/// output.
fn say(what: &str) {
    let output = rustix::stdio::stderr();
    let mut room = [PollFd::new(&output, PollFlags::OUT)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    if rustix::event::poll(&mut room, Some(&now)) == Ok(1) {
        // Standard error is the only place to report a failure to.
        let _ = rustix::io::write(output, format!("blockhouse: {what}\n").as_bytes());
    }
}
