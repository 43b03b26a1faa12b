//! Serving a device at a socket: one front-end after the other, and the orderly end.
//!
//! Guarantees: a front-end that is silent, breaks the protocol, or takes its memory away delays only itself.
//! When it ends, its requests in flight complete before the next front-end is served. A server that stops
//! executes every request that it popped, and the guest learns of its outcome.

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

use crate::device::Device;
use crate::session::Session;

/// How long the server waits after the kernel could not accept a connection.
const RETRY_DELAY: Duration = Duration::from_millis(100);

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
    is_stopping: bool,
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

    /// Accepts no front-end any more, completes what is in flight, and ends. The loops must still run.
    pub fn stop(self) {
        {
            let mut state = self.shared.state.lock();
            state.is_stopping = true;
            // Only the receiving half: the front-end sees the end when everything has completed.
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
        if shared.state.lock().is_stopping {
            return;
        }
        match accepted {
            Ok(stream) => {
                if let Err(error) = serve_one(shared, device, stream) {
                    warn(&shortages, "cannot serve a front-end", &error);
                }
            }
            Err(error) => {
                warn(&shortages, "cannot accept a front-end", &error);
                std::thread::sleep(RETRY_DELAY);
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
fn serve_one<S: Storage + Send + Sync>(
    shared: &Shared,
    device: &Arc<Device<S>>,
    stream: UnixStream,
) -> io::Result<()> {
    // What may fail for lack of descriptors comes first: a socket left in `current` would stay open, and
    // its front-end would wait for ever.
    let current = stream.try_clone()?;
    let session = Session::new(device, stream)?;
    {
        let mut state = shared.state.lock();
        if state.is_stopping {
            return Ok(());
        }
        state.current = Some(current);
    }
    session.run(|| {
        let mut state = shared.state.lock();
        state.current = None;
        state.is_stopping
    });
    Ok(())
}
