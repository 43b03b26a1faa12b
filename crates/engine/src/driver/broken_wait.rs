//! Unexpected errors of the calls in which a loop waits (`io_uring_enter`, `epoll_wait`,
//! `io_getevents`).
//!
//! Some are temporary: the kernel was short of memory. So the loop continues after a pause, which
//! keeps it from spinning. If every call fails for seconds, the loop can no longer serve anything:
//! it panics, so that a service manager can restart the server.

use std::io;
use std::time::Duration;

/// The pause after a failed call.
const PAUSE: Duration = Duration::from_millis(1);
/// The number of successive failures after which the loop gives up; they take at least ten seconds.
const MAX_FAILURES: u32 = 10_000;

/// Counts the failures of one loop's calls.
#[derive(Debug, Default)]
pub(crate) struct BrokenWait(u32);

impl BrokenWait {
    /// The call succeeded.
    pub(crate) fn worked(&mut self) {
        self.0 = 0;
    }

    /// Counts an unexpected failure of the call, and pauses.
    ///
    /// # Panics
    /// If the call has failed for seconds without one success.
    pub(crate) fn failed(&mut self, call: &str, error: &io::Error) {
        assert!(self.goes_on(call, error), "{call} fails all the time: {error}");
    }

    /// As [`failed`](Self::failed), for a wait that must not unwind: it aborts the process.
    pub(crate) fn failed_or_abort(&mut self, call: &str, error: &io::Error) {
        if !self.goes_on(call, error) {
            eprintln!("blockhouse: {call} fails all the time: {error}");
            std::process::abort();
        }
    }

    /// Counts a failure and pauses; `false` after too many.
    fn goes_on(&mut self, call: &str, error: &io::Error) -> bool {
        self.0 += 1;
        if self.0 == 1 {
            tracing::error!("{call} failed, and is tried again: {error}");
        }
        if self.0 < MAX_FAILURES {
            std::thread::sleep(PAUSE);
        }
        self.0 < MAX_FAILURES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_works_again_is_forgiven() {
        let mut wait = BrokenWait::default();
        let error = io::Error::from_raw_os_error(libc::ENOMEM);
        for _ in 0..3 {
            wait.failed("io_uring_enter", &error);
        }
        wait.worked();
        assert_eq!(wait.0, 0);
    }

    #[test]
    #[should_panic(expected = "io_uring_enter fails all the time")]
    fn a_call_that_never_works_ends_the_loop() {
        let mut wait = BrokenWait(MAX_FAILURES - 2);
        let error = io::Error::from_raw_os_error(libc::EBADF);
        wait.failed("io_uring_enter", &error);
        wait.failed("io_uring_enter", &error);
    }
}
