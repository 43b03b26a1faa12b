//! Waiting until the kernel has released the locks and sockets of a killed process.
//!
//! The kernel completes the I/O of a killed process before it closes its files and sockets. Until
//! then its image locks are held, and its sockets accept connections.

use std::thread::sleep;
use std::time::{Duration, Instant};

/// The maximum wait for the release.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(1);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Calls `is_released` until it returns true, or for a second; returns its last result. Blocks the
/// thread.
///
/// # Errors
/// The first error of `is_released`.
pub fn wait_until_released<E>(mut is_released: impl FnMut() -> Result<bool, E>) -> Result<bool, E> {
    let deadline = Instant::now() + RELEASE_TIMEOUT;
    loop {
        // The clock is read first, so that there is one more check after the last pause.
        let is_late = Instant::now() >= deadline;
        if is_released()? {
            return Ok(true);
        }
        if is_late {
            return Ok(false);
        }
        sleep(POLL_INTERVAL);
    }
}
