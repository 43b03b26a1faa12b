//! How a driver is notified: an eventfd that the front-end sent.

use std::io;
use std::os::fd::OwnedFd;

use blockhouse_engine::EventSignal;

/// An eventfd to signal. A signal never waits, even if the front-end fills the counter, changes the
/// flags of the file or never reads it.
pub struct Call(EventSignal);

impl Call {
    /// A call by this eventfd.
    ///
    /// # Errors
    /// `InvalidInput` if the descriptor is not an eventfd; the kernel's if it cannot be signalled
    /// without waiting.
    pub fn new(descriptor: OwnedFd) -> io::Result<Self> {
        EventSignal::new(descriptor).map(Self)
    }

    /// Signals the eventfd. If its counter is full, a signal is pending anyway.
    pub fn signal(&self) {
        self.0.signal();
    }
}
