//! The clients of a listening socket.

use std::io;
use std::time::Duration;

use blockhouse_engine::{Listener, Stream, sleep};
use futures_util::stream::{self, unfold};

/// The pause after an error of `accept`, such as EMFILE.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// Accepts clients without end.
pub(crate) fn accepted(listener: Listener) -> impl stream::Stream<Item = io::Result<Stream>> {
    unfold(listener, |listener| async move {
        let accepted = listener.accept().await;
        if accepted.is_err() {
            sleep(RETRY_DELAY).await;
        }
        Some((accepted, listener))
    })
}
