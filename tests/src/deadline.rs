//! Waits with a limit of time.

use std::io::Write;
use std::process::{Child, ExitStatus};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

const STEP: Duration = Duration::from_millis(2);
/// Longer than any test takes, also in parallel with many others.
const TEST_LIMIT: Duration = Duration::from_secs(15 * 60);

/// Aborts the test program, and names the test, unless this is dropped within 15 minutes: a test
/// that hangs would hide the results of all others.
pub(crate) struct TestLimit {
    _end: Sender<()>,
}

impl TestLimit {
    /// Starts the time of the test that this thread runs.
    pub(crate) fn new() -> Self {
        let (end, is_over) = channel();
        let test = std::thread::current().name().unwrap_or("a thread of a test").to_owned();
        std::thread::spawn(move || {
            if is_over.recv_timeout(TEST_LIMIT) == Err(RecvTimeoutError::Timeout) {
                // Not `eprintln`, whose text is kept until the test ends.
                let _ = writeln!(std::io::stderr(), "{test} hangs: all tests are ended");
                std::process::abort();
            }
        });
        Self { _end: end }
    }
}

/// The seconds in the environment variable `variable`; `usual` if it is not set.
///
/// # Panics
/// When it is not a number.
pub fn seconds_in(variable: &str, usual: u64) -> Duration {
    let seconds = std::env::var(variable);
    Duration::from_secs(seconds.map_or(usual, |text| text.parse().expect("a number of seconds")))
}

/// Waits until the process has ended; `None` if it still runs after `limit`.
///
/// # Panics
/// When the process is not ours to wait for.
pub fn wait_for_exit(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let mut status = None;
    eventually(limit, || {
        status = child.try_wait().expect("a child can be waited for");
        status.is_some()
    });
    status
}

/// Waits until `condition` holds; returns whether it did within `limit`.
pub fn eventually(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit;
    loop {
        if condition() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(STEP);
    }
}
