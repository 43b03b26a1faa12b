//! Calls that can only be waited for: each has a thread of its own, so that it holds up nothing
//! else.

use std::io;

use futures_channel::oneshot;

/// Makes the call on a thread of this name. If the future is dropped, the call still runs to its
/// end.
///
/// # Errors
/// There is no thread for it.
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
