//! One front-end from its connection to its end.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use blockhouse_core::Storage;
use blockhouse_disk::ExportKind;

use crate::device::Device;
use crate::frontend::{Frontend, handle};
use crate::protocol::Connection;
use crate::queue::StopMode;

/// Serves one front-end on this thread until it closes the connection or breaks the protocol; its queues run
/// on the device's loops. For programs that accept connections themselves: one front-end at a time for each
/// device.
///
/// # Errors
/// The kernel's, when the connection cannot be duplicated. A front-end that breaks the protocol is logged.
pub fn serve_frontend<S: Storage + Send + Sync>(
    device: &Arc<Device<S>>,
    stream: UnixStream,
) -> io::Result<()> {
    Session::new(device, stream)?.run(|| false);
    Ok(())
}

/// A connected front-end.
pub struct Session<S: Storage> {
    device: Arc<Device<S>>,
    frontend: Frontend<S>,
    connection: Connection,
}

impl<S: Storage + Send + Sync> Session<S> {
    /// A front-end at the other end of this connection.
    ///
    /// # Errors
    /// The kernel's, when the connection cannot be duplicated.
    pub fn new(device: &Arc<Device<S>>, stream: UnixStream) -> io::Result<Self> {
        let frontend = Frontend::new(Arc::clone(device), &stream)?;
        let (device, connection) = (Arc::clone(device), Connection::new(stream));
        Ok(Self { device, frontend, connection })
    }

    /// Handles messages until the end, and waits for the requests in flight. `is_stopping` is asked when there
    /// are no more messages: whether the server ends, rather than the front-end.
    pub fn run(mut self, is_stopping: impl FnOnce() -> bool) {
        let _client = self.device.export.disk.enter_client(ExportKind::VhostUser);
        let end = self.handle_messages();
        let lost = self.frontend.lost_memory();
        let mode = match is_stopping() && lost.is_none() {
            true => StopMode::Graceful,
            false => StopMode::Disconnected,
        };
        let disk = self.device.export.disk.name();
        match (lost, end) {
            (Some(lost), _) => tracing::error!(disk, "front-end dropped: {lost}"),
            (None, Ok(())) => tracing::debug!(disk, "the front-end left"),
            (None, Err(_)) if mode == StopMode::Graceful => {}
            (None, Err(error)) => tracing::warn!(disk, "front-end dropped: {error}"),
        }
        *self.device.backend_channel.lock() = None;
        self.frontend.stop_all(mode);
    }

    fn handle_messages(&mut self) -> io::Result<()> {
        while let Some(message) = self.connection.receive()? {
            handle(&mut self.frontend, message, &self.connection)?;
        }
        Ok(())
    }
}
