//! Serving a device at a socket: one front-end after the other, and the orderly end.
//!
//! Promises: a front-end that is silent, talks nonsense, or takes its memory away holds up nobody but
//! itself; when one goes,
//! its requests in flight end before the next one is served; a server that stops has every request
//! that it took carried out and the guest told of it.

use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use blockhouse_core::Storage;
use blockhouse_engine::{ShortageLog, is_shortage};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags};

use crate::connection::Connection;
use crate::device::Device;
use crate::frontend::Frontend;
use crate::queue::Manner;

/// How long to leave the kernel alone after it could not accept a connection.
const PAUSE: Duration = Duration::from_millis(100);

/// A device that is served.
pub struct Server<S: Storage> {
    device: Arc<Device<S>>,
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

struct Shared {
    listener: UnixListener,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    stopping: bool,
    /// The connection of the front-end that is served.
    current: Option<UnixStream>,
}

impl<S: Storage + Send + Sync> Server<S> {
    /// Serves `device` at a listening socket, on a thread of its own; its queues run on their loops.
    ///
    /// # Errors
    /// The kernel's, when there can be no further thread.
    pub fn start(device: Device<S>, socket: OwnedFd) -> io::Result<Self> {
        let listener = UnixListener::from(socket);
        listener.set_nonblocking(false)?;
        let shared = Arc::new(Shared { listener, state: Mutex::default() });
        let device = Arc::new(device);
        let (serving, served) = (Arc::clone(&shared), Arc::clone(&device));
        let builder = std::thread::Builder::new().name("blockhouse-vu".into());
        let thread = builder.spawn(move || serve(&serving, &served))?;
        Ok(Self { device, shared, thread })
    }

    /// The device.
    pub fn device(&self) -> &Device<S> {
        &self.device
    }

    /// Accepts nobody any more, finishes what is in flight, and ends. The loops must still run.
    pub fn stop(self) {
        {
            let mut state = self.shared.state.lock();
            state.stopping = true;
            // Only what comes in: the front-end sees the end when everything is finished.
            let _ = state.current.as_ref().map(|stream| stream.shutdown(Shutdown::Read));
        }
        // Ends a wait for connections.
        let _ = rustix::net::shutdown(&self.shared.listener, rustix::net::Shutdown::Both);
        // A thread that panicked is over as well.
        let _ = self.thread.join();
    }
}

fn serve<S: Storage + Send + Sync>(shared: &Shared, device: &Arc<Device<S>>) {
    let shortages = ShortageLog::default();
    loop {
        let accepted = accept(&shared.listener);
        if shared.state.lock().stopping {
            return;
        }
        match accepted {
            Ok(stream) => {
                if let Err(error) = converse(shared, device, stream) {
                    warn(&shortages, "cannot serve a front-end", &error);
                }
            }
            Err(error) => {
                warn(&shortages, "cannot accept a front-end", &error);
                std::thread::sleep(PAUSE);
            }
        }
    }
}

/// Logs that there is one front-end less; shortages at a bounded rate, since a front-end that is refused
/// may come again at once.
fn warn(shortages: &ShortageLog, effect: &str, error: &io::Error) {
    match is_shortage(error) {
        true => shortages.warn(effect, error),
        false => tracing::warn!("{effect}: {error}"),
    }
}

/// Waits for a front-end before it is accepted: the kernel takes a descriptor before it looks for one.
fn accept(listener: &UnixListener) -> io::Result<UnixStream> {
    let mut polled = [PollFd::new(listener, PollFlags::IN)];
    rustix::event::poll(&mut polled, None)?;
    Ok(listener.accept()?.0)
}

/// Serves one front-end to its end.
fn converse<S: Storage + Send + Sync>(
    shared: &Shared,
    device: &Arc<Device<S>>,
    stream: UnixStream,
) -> io::Result<()> {
    // What may fail for lack of descriptors comes first: a socket left in `current` would stay open, and
    // its front-end would wait for ever.
    let mut frontend = Frontend::new(Arc::clone(device), &stream)?;
    let current = stream.try_clone()?;
    {
        let mut state = shared.state.lock();
        if state.stopping {
            return Ok(());
        }
        state.current = Some(current);
    }
    let connection = Connection::new(stream);
    let end = loop {
        match connection.receive() {
            Ok(Some(message)) => {
                if let Err(error) = frontend.handle(message, &connection) {
                    break Some(error);
                }
            }
            Ok(None) => break None,
            Err(error) => break Some(error),
        }
    };
    let lost = frontend.lost_memory();
    let manner = {
        let mut state = shared.state.lock();
        state.current = None;
        if state.stopping && lost.is_none() { Manner::Orderly } else { Manner::Abandoned }
    };
    let disk = device.export.disk.name();
    match end {
        _ if lost.is_some() => {
            tracing::error!(disk, "front-end dropped: {}", lost.unwrap_or_default());
        }
        None => tracing::debug!(disk, "the front-end left"),
        Some(_) if manner == Manner::Orderly => {}
        Some(error) => tracing::warn!(disk, "front-end dropped: {error}"),
    }
    *device.listener.lock() = None;
    frontend.stop_all(manner);
    Ok(())
}
