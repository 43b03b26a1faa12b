//! One front-end from its connection to its end.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use blockhouse_core::Storage;
use blockhouse_disk::{ClientGuard, ExportKind};

use crate::device::Device;
use crate::frontend::{Frontend, PreparedFrontend, handle};
use crate::pauses::Pauses;
use crate::protocol::{Arrival, Connection};
use crate::queue::StopMode;

/// Serves one front-end on this thread until it closes the connection or breaks the protocol; its
/// queues run on the device's loops. For programs that accept connections themselves. Each device
/// may have only one front-end at a time.
///
/// # Errors
/// If the connection cannot be duplicated. A front-end that breaks the protocol is logged.
pub fn serve_frontend<S: Storage + Send + Sync>(
    device: &Arc<Device<S>>,
    stream: UnixStream,
) -> io::Result<()> {
    Session::new(device, stream)?.run(None, || false);
    Ok(())
}

/// A connected front-end.
pub struct Session<S: Storage> {
    device: Arc<Device<S>>,
    frontend: Frontend<S>,
    connection: Connection,
    /// Counts the front-end as a client of the disk.
    _client: ClientGuard,
}

impl<S: Storage + Send + Sync> Session<S> {
    /// A front-end at the other end of this connection.
    ///
    /// # Errors
    /// If the connection cannot be duplicated.
    pub fn new(device: &Arc<Device<S>>, stream: UnixStream) -> io::Result<Self> {
        let frontend = Frontend::new(Arc::clone(device), &stream)?;
        let (device, connection) = (Arc::clone(device), Connection::new(stream));
        let client = device.export.disk.stats().enter_client(ExportKind::VhostUser);
        Ok(Self { device, frontend, connection, _client: client })
    }

    /// A front-end that paused in another process.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn restore(device: &Arc<Device<S>>, prepared: PreparedFrontend) -> io::Result<Self> {
        let connection = Connection::new(prepared.stream().try_clone()?);
        let frontend = Frontend::restore(Arc::clone(device), prepared);
        let client = device.export.disk.stats().enter_client_again(ExportKind::VhostUser);
        Ok(Self { device: Arc::clone(device), frontend, connection, _client: client })
    }

    /// Resumes queues that have paused, handles messages until the end, and waits for the requests
    /// in flight. Between two messages it pauses if `pauses` has a request. `is_stopping` is called
    /// after the last message. It returns true if the server has ended the session, and false if
    /// the front-end has.
    pub fn run(mut self, pauses: Option<&Pauses>, is_stopping: impl FnOnce() -> bool) {
        let device = Arc::clone(&self.device);
        let _observed = device.observe(self.connection.stream());
        self.frontend.resume();
        let end = self.handle_messages(pauses);
        let lost = self.frontend.lost_memory();
        let mode = if is_stopping() && lost.is_none() {
            StopMode::Graceful
        } else {
            StopMode::Disconnected
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

    fn handle_messages(&mut self, pauses: Option<&Pauses>) -> io::Result<()> {
        loop {
            if let Some(pauses) = pauses
                && self.connection.wait(pauses.wake())? == Arrival::Other
            {
                self.pause(pauses);
                continue;
            }
            let Some(message) = self.connection.receive()? else { return Ok(()) };
            handle(&mut self.frontend, message, &self.connection)?;
        }
    }

    fn pause(&mut self, pauses: &Pauses) {
        let Some(asked) = pauses.take() else { return };
        match self.frontend.pause(asked.deadline()) {
            // The front-end's connection is about to end. The pause is handled after that.
            Ok(None) => return pauses.put_back(asked),
            Ok(Some(paused)) => asked.answer(Ok(Some(paused))),
            Err(error) => asked.answer(Err(error)),
        }
        self.frontend.resume();
    }
}
