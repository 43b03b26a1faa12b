//! Waiting, but not for ever.

use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

const STEP: Duration = Duration::from_millis(2);

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
