//! Waits with a limit of time.

use std::io::Write;
use std::process::{Child, ExitStatus};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

const STEP: Duration = Duration::from_millis(2);
/// More than any test takes, also beside many others.
const TEST_LIMIT: Duration = Duration::from_secs(15 * 60);

/// Ends the program of the tests where it is not dropped within 15 minutes, and names the test: one
/// that hangs would keep what all others have found from being told.
pub(crate) struct TestLimit {
    _end: Sender<()>,
}

impl TestLimit {
    /// The test that this thread runs has begun.
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
/// It is no number.
pub fn seconds_in(variable: &str, usual: u64) -> Duration {
    let seconds = std::env::var(variable);
    Duration::from_secs(seconds.map_or(usual, |text| text.parse().expect("a number of seconds")))
}

/// Waits until the process has ended; `None` when it has not after `limit`.
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

/// Waits until `condition` holds; whether it did before `limit`.
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
