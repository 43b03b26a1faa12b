//! Tells the service manager that the server is stopping, and that it makes progress.
//!
//! Guarantee: from [`StoppingNotice::start`] to [`end`](StoppingNotice::end), but for at most
//! [`MAX_TIME`], the service manager always grants more time than passes until the next message
//! (`EXTEND_TIMEOUT_USEC`, sd_notify(3)). Reason: clients that still receive replies, and a last
//! flush of a slow disk, may take longer than a unit's `TimeoutStopSec=`, after which the manager
//! sends SIGKILL. A stop that hangs must end by that signal, so the requests end. Without a service
//! manager nothing is sent.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use sd_notify::NotifyState;

use crate::process::service_manager;

/// Interval of the requests for more time.
const EVERY: Duration = Duration::from_secs(5);
/// The requested time. It exceeds the interval because the next request may be late on a loaded
/// machine.
const MORE: Duration = Duration::from_secs(20);
/// The maximum time for which more time is requested.
const MAX_TIME: Duration = Duration::from_mins(15);

/// A stop in progress.
pub struct StoppingNotice {
    ended: Sender<()>,
    /// `None` without a service manager, or if the thread could not be started.
    thread: Option<JoinHandle<()>>,
}

impl StoppingNotice {
    /// Reports that the stop begins, and then periodically that it continues.
    pub fn start() -> Self {
        let (ended, end) = channel();
        if std::env::var_os("NOTIFY_SOCKET").is_none() {
            return Self { ended, thread: None };
        }
        let more = || NotifyState::ExtendTimeoutUsec(MORE.as_micros() as u32);
        let status =
            NotifyState::Status("stopping: requests in flight complete, then the last flush");
        service_manager::tell(&[NotifyState::Stopping, status, more()]);
        let go_on = move || repeat(&end, EVERY, MAX_TIME, || service_manager::tell(&[more()]));
        let thread = std::thread::Builder::new().name("stopping-notice".into()).spawn(go_on).ok();
        Self { ended, thread }
    }

    /// Ends the reports, because the stop has completed.
    pub fn end(self) {
        drop(self.ended);
        // The thread only waits for `ended`, so it ends at once.
        self.thread.map(JoinHandle::join);
    }
}

/// Calls `tell` after each `interval`, until `end` is disconnected or `limit` is over.
fn repeat(end: &Receiver<()>, interval: Duration, limit: Duration, tell: impl Fn()) {
    let begin = Instant::now();
    while end.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) && begin.elapsed() < limit {
        tell();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_that_hangs_asks_for_no_more_time() {
        let (ended, end) = channel();
        let (told, tells) = channel();
        let (interval, limit) = (Duration::from_millis(1), Duration::from_millis(50));
        std::thread::spawn(move || repeat(&end, interval, limit, || _ = told.send(())));
        let is_over = || tells.recv_timeout(Duration::from_secs(60)).is_err();
        assert!((0..=50).any(|_| is_over()), "more than one message in each interval");
        // Disconnected: the thread has ended.
        assert!(tells.recv().is_err());
        drop(ended);
    }
}
