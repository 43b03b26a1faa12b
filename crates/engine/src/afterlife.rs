//! What a killed process leaves behind for a moment.
//!
//! The kernel ends the I/O of a killed process in its own time, and as long its files and sockets stay
//! open: image locks are held, and connections to its sockets are taken.

use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long that may take.
const AFTERLIFE: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(20);

/// Asks `is_gone` until it is so, or has not become so for a second; the last answer. Blocks the thread.
///
/// # Errors
/// The first of `is_gone`.
pub fn outlast<E>(mut is_gone: impl FnMut() -> Result<bool, E>) -> Result<bool, E> {
    let deadline = Instant::now() + AFTERLIFE;
    loop {
        // Looked at before, so that it is asked once more after the last pause.
        let is_late = Instant::now() >= deadline;
        if is_gone()? {
            return Ok(true);
        }
        if is_late {
            return Ok(false);
        }
        sleep(PAUSE);
    }
}
