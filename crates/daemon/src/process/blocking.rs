//! Work that may block runs on its own thread, so that no event loop waits for it: listening (which
//! probes for a running server), and the end of a guest's device.

use anyhow::{Context, Result};
use futures_channel::oneshot;

/// Runs `work` on a thread of its own, and waits for its outcome.
///
/// # Errors
/// The host has no further thread, or the work panicked.
pub(crate) async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let (done, outcome) = oneshot::channel();
    let builder = std::thread::Builder::new().name("blockhouse-work".into());
    // The caller's future may have been dropped.
    builder.spawn(move || drop(done.send(work()))).context("cannot start a thread")?;
    outcome.await.context("a thread ended badly")
}
