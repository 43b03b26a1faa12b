//! Serves a device at a socket to one front-end after the other, until an orderly end.
//!
//! Guarantees: a front-end that is silent, breaks the protocol, or truncates its memory delays only
//! itself. When it ends, its requests in flight complete before the next front-end is served. A
//! server that stops executes every request that it has popped, and publishes the outcome to the
//! guest. A server that has paused accesses neither the disk nor a guest's memory, and neither
//! accepts nor closes a connection.

use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blockhouse_core::Storage;
use blockhouse_engine::{ShortageLog, is_shortage};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags};

use crate::device::Device;
use crate::frontend::PreparedFrontend;
use crate::pauses::{Pauses, PendingPause};
use crate::session::Session;

/// How long the server waits after the kernel could not accept a connection.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// A device that is served.
pub struct Server<S: Storage> {
    device: Arc<Device<S>>,
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
    /// Holds the device in a pause. The device continues when the sender is dropped.
    hold: Mutex<Option<Sender<()>>>,
}

struct Shared {
    listener: UnixListener,
    pauses: Pauses,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    is_stopping: bool,
    /// The connection of the front-end that is served.
    current: Option<UnixStream>,
}

impl<S: Storage + Send + Sync> Server<S> {
    /// Serves `device` at a listening socket, on a thread of its own; its queues run on their
    /// loops.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(device: Device<S>, socket: OwnedFd) -> io::Result<Self> {
        Self::restore(device, socket, None)
    }

    /// As [`start`](Self::start), but serves the front-end that paused in another process first, if
    /// any.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn restore(
        device: Device<S>,
        socket: OwnedFd,
        frontend: Option<PreparedFrontend>,
    ) -> io::Result<Self> {
        let listener = UnixListener::from(socket);
        listener.set_nonblocking(false)?;
        let (pauses, state) = (Pauses::new()?, Mutex::default());
        let shared = Arc::new(Shared { listener, pauses, state });
        let device = Arc::new(device);
        let (serving, served) = (Arc::clone(&shared), Arc::clone(&device));
        let builder = std::thread::Builder::new().name("blockhouse-vu".into());
        let thread = builder.spawn(move || serve(&serving, &served, frontend))?;
        Ok(Self { device, shared, thread, hold: Mutex::new(None) })
    }

    /// The listening socket.
    pub fn listener(&self) -> BorrowedFd<'_> {
        self.shared.listener.as_fd()
    }

    /// Requests a pause of the device: it handles no more messages and accepts no connection; its
    /// queues pop no more requests, and those in flight complete until the deadline.
    /// [`resume`](Self::resume) follows in every case.
    pub fn pause(&self, deadline: Instant) -> PendingPause {
        let (pending, hold) = self.shared.pauses.ask(deadline);
        *self.hold.lock() = Some(hold);
        pending
    }

    /// Resumes the device after a pause.
    pub fn resume(&self) {
        *self.hold.lock() = None;
    }

    /// The device.
    pub fn device(&self) -> &Device<S> {
        &self.device
    }

    /// Begins to [stop](Self::stop): accepts no further front-end, and pops no more requests.
    pub fn begin_stop(&self) {
        {
            let mut state = self.shared.state.lock();
            state.is_stopping = true;
            // Shuts down only the receiving half: the front-end sees the end of the connection when
            // all requests have completed.
            let _ = state.current.as_ref().map(|stream| stream.shutdown(Shutdown::Read));
        }
        self.resume();
        // The shutdown ends a wait for connections.
        let _ = rustix::net::shutdown(&self.shared.listener, rustix::net::Shutdown::Both);
    }

    /// Accepts no further front-end, completes the requests in flight, and ends the server. The
    /// loops must still run.
    pub fn stop(self) {
        self.begin_stop();
        // An error is ignored: a thread that panicked has ended too.
        let _ = self.thread.join();
    }
}

fn serve<S: Storage + Send + Sync>(
    shared: &Shared,
    device: &Arc<Device<S>>,
    handed_over: Option<PreparedFrontend>,
) {
    let shortages = ShortageLog::default();
    let cannot_serve = |error| warn(&shortages, "cannot serve a front-end", &error);
    if let Some(prepared) = handed_over {
        let current = prepared.stream().try_clone();
        let served = current
            .and_then(|stream| serve_one(shared, stream, || Session::restore(device, prepared)));
        served.unwrap_or_else(cannot_serve);
    }
    loop {
        let accepted = accept(shared);
        if shared.state.lock().is_stopping {
            return;
        }
        match accepted {
            Ok(None) => shared.pauses.take().into_iter().for_each(|asked| asked.answer(Ok(None))),
            Ok(Some(stream)) => {
                // The connection is duplicated before it is stored in `current`. Reason: if a step
                // failed for lack of descriptors after that, the socket in `current` would stay
                // open, and its front-end would never get a reply.
                let current = stream.try_clone();
                let served = current
                    .and_then(|copy| serve_one(shared, copy, || Session::new(device, stream)));
                served.unwrap_or_else(cannot_serve);
            }
            Err(error) => {
                warn(&shortages, "cannot accept a front-end", &error);
                std::thread::sleep(RETRY_DELAY);
            }
        }
    }
}

/// Logs the loss of a front-end. Shortages of resources are logged at a bounded rate, since a
/// refused front-end may reconnect at once.
fn warn(shortages: &ShortageLog, effect: &str, error: &io::Error) {
    if is_shortage(error) {
        shortages.warn(effect, error)
    } else {
        tracing::warn!("{effect}: {error}")
    }
}

/// Waits for a front-end before accept(2) is called, because accept(2) allocates a descriptor
/// before it waits. `None` when a pause is requested.
fn accept(shared: &Shared) -> io::Result<Option<UnixStream>> {
    let wake = shared.pauses.wake();
    let mut polled =
        [PollFd::new(&shared.listener, PollFlags::IN), PollFd::new(&wake, PollFlags::IN)];
    rustix::event::poll(&mut polled, None)?;
    if !polled[1].revents().is_empty() {
        return Ok(None);
    }
    Ok(Some(shared.listener.accept()?.0))
}

/// Serves one front-end to its end. `current` is its connection.
fn serve_one<S: Storage + Send + Sync>(
    shared: &Shared,
    current: UnixStream,
    begin: impl FnOnce() -> io::Result<Session<S>>,
) -> io::Result<()> {
    let session = begin()?;
    {
        let mut state = shared.state.lock();
        if state.is_stopping {
            return Ok(());
        }
        state.current = Some(current);
    }
    session.run(Some(&shared.pauses), || {
        let mut state = shared.state.lock();
        state.current = None;
        state.is_stopping
    });
    Ok(())
}
