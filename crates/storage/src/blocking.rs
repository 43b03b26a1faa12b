//! Blocking calls. Each runs on a thread of its own, so that it does not block an event loop.

use std::io;

use futures_channel::oneshot;

/// Makes the call on a new thread named `name`. If the future is dropped, the call still runs to
/// its end.
///
/// # Errors
/// If no thread can be created, or the call panics.
pub(crate) async fn run_blocking<T: Send + 'static>(
    name: &str,
    call: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let (send, receive) = oneshot::channel();
    std::thread::Builder::new().name(name.into()).spawn(move || {
        // The send fails if the future was dropped.
        let _ = send.send(call());
    })?;
    receive.await.map_err(|_| io::ErrorKind::Interrupted.into())
}
