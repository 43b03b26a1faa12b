//! Lets another thread pause a device's thread.
//!
//! Guarantees: a paused device stays paused until the thread that requested it resumes it, or ends.
//! If that thread drops its [`PendingPause`] without a wait, the device does not stay paused.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

use crate::frontend::{PauseError, PausedFrontend};

/// The result of a pause.
pub type Outcome = Result<Option<PausedFrontend>, PauseError>;

/// How long after its deadline the outcome of a pause may arrive.
const MARGIN: Duration = Duration::from_millis(500);

/// The pauses requested from a device's thread.
pub struct Pauses {
    /// An eventfd, readable while a requested pause waits to be taken.
    wake: OwnedFd,
    asked: Mutex<Option<Asked>>,
}

/// A pause that the device's thread has to carry out.
pub struct Asked {
    deadline: Instant,
    outcome: Sender<Outcome>,
    /// Closed when the device should continue.
    resumed: Receiver<()>,
}

/// The requesting thread's side of a pause, which may fail.
#[must_use]
pub struct PendingPause {
    deadline: Instant,
    outcome: Receiver<Outcome>,
}

impl PendingPause {
    /// Waits for the pause. Returns the front-end that has paused, if the device has one.
    ///
    /// # Errors
    /// The reason why the device has not paused in time. [`Server::resume`](crate::Server::resume)
    /// must be called even then.
    pub fn wait(self) -> Outcome {
        let limit = (self.deadline + MARGIN).saturating_duration_since(Instant::now());
        match self.outcome.recv_timeout(limit) {
            Ok(outcome) => outcome,
            Err(RecvTimeoutError::Timeout) => Err(PauseError::Message),
            // The device's thread has ended, and serves no front-end.
            Err(RecvTimeoutError::Disconnected) => Ok(None),
        }
    }
}

impl Pauses {
    /// The state without a requested pause.
    ///
    /// # Errors
    /// If no more descriptors are available.
    pub fn new() -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { wake, asked: Mutex::new(None) })
    }

    /// Requests a pause. The device continues when the sender is dropped.
    pub fn ask(&self, deadline: Instant) -> (PendingPause, Sender<()>) {
        let (to_outcome, outcome) = channel();
        let (hold, resumed) = channel();
        *self.asked.lock() = Some(Asked { deadline, outcome: to_outcome, resumed });
        self.signal();
        (PendingPause { deadline, outcome }, hold)
    }

    fn signal(&self) {
        // The write fails only if the counter is full; then the eventfd is readable anyway.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// The descriptor that becomes readable when a pause is requested.
    pub fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// The requested pause, unless the requesting thread no longer waits.
    pub fn take(&self) -> Option<Asked> {
        // An error is ignored: the counter may be 0.
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        let asked = self.asked.lock().take()?;
        (asked.resumed.try_recv() == Err(TryRecvError::Empty)).then_some(asked)
    }

    /// Puts the pause back, so that the next call of [`take`](Self::take) returns it.
    pub fn put_back(&self, asked: Asked) {
        *self.asked.lock() = Some(asked);
        self.signal();
    }
}

impl Asked {
    /// The deadline until which requests may complete.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Reports the outcome. If the device has paused, waits until it should continue.
    pub fn answer(self, outcome: Outcome) {
        let has_paused = outcome.is_ok();
        if self.outcome.send(outcome).is_ok() && has_paused {
            // `recv` returns when the requesting thread drops its sender.
            let _ = self.resumed.recv();
        }
    }
}
