//! Tells the service manager that the server is stopping, and that it makes progress.
//!
//! Guarantee: from [`StoppingNotice::start`] to [`end`](StoppingNotice::end) the service manager
//! always grants more time than passes until the next message (`EXTEND_TIMEOUT_USEC`,
//! sd_notify(3)). Reason: clients that still receive replies, and a last flush of a slow disk, may
//! take longer than a unit's `TimeoutStopSec=`, after which the manager sends SIGKILL. Without a
//! service manager nothing is sent.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use sd_notify::NotifyState;

use crate::process::service_manager;

/// Interval of the requests for more time.
const EVERY: Duration = Duration::from_secs(5);
/// The requested time. It exceeds the interval because the next request may be late on a loaded
/// machine.
const MORE: Duration = Duration::from_secs(20);

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
        let go_on = move || {
            while end.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                service_manager::tell(&[more()]);
            }
        };
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
