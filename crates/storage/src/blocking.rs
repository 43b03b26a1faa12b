//! Blocking calls: each runs on its own thread, so that it blocks nothing else.

use std::io;

use futures_channel::oneshot;

/// Makes the call on a thread of this name. If the future is dropped, the call still runs to its
/// end.
///
/// # Errors
/// No thread can be created.
pub(crate) async fn run_blocking<T: Send + 'static>(
    name: &str,
    call: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let (send, receive) = oneshot::channel();
    std::thread::Builder::new().name(name.into()).spawn(move || {
        // The future may have been dropped.
        let _ = send.send(call());
    })?;
    receive.await.map_err(|_| io::ErrorKind::Interrupted.into())
}
