//! Why the tables of an image stand still, and how those who wait are told.

use blockhouse_core::Error;
use blockhouse_core::sync::WaitGroup;
use event_listener::{Event, EventListener};

/// Why tables stand still.
pub(crate) enum Frozen {
    /// The image is being changed as a whole.
    Held(Thawed),
    /// That was given up, and writes of it are under way.
    Draining(WaitGroup),
    /// It failed at its last step: for good.
    Failed(Error),
}

/// Tells those who wait when it is dropped.
#[derive(Default)]
pub(crate) struct Thawed(Event);

impl Thawed {
    /// Resolves when it is dropped.
    pub(crate) fn listen(&self) -> EventListener {
        self.0.listen()
    }
}

impl Drop for Thawed {
    fn drop(&mut self) {
        self.0.notify(usize::MAX);
    }
}
