//! Freezes the tables while the image is changed as a whole.
//!
//! 1. A transaction freezes the tables: steps that change tables wait for its end.
//! 2. The transaction ends: steps may change the tables again, at once or when writes that are
//!    still in flight have completed.
//! 3. If the transaction fails at its last step, it is unknown which tables are active on disk, and
//!    every change fails until the image is opened again.

use blockhouse_core::Error;
use blockhouse_core::sync::WaitGroup;
use event_listener::{Event, EventListener};

use super::step::{Blocked, Step};

/// Whether steps may change the tables.
#[derive(Default)]
pub(crate) enum FreezeState {
    /// Steps may change the tables.
    #[default]
    Active,
    /// The image is being changed as a whole.
    Frozen(ThawEvent),
    /// A transaction was dropped, and its table writes are in flight.
    Draining(WaitGroup),
    /// A transaction failed at its last step.
    Failed(Error),
}

impl FreezeState {
    pub(crate) fn is_active(&self) -> bool {
        matches!(self, Self::Active)
    }

    /// Returns `Blocked` until steps may change the tables.
    pub(crate) fn wait_thawed(&mut self) -> Step<()> {
        let waiting = match self {
            Self::Active => return Ok(()),
            Self::Frozen(thawed) => Some(thawed.listen()),
            Self::Draining(writes) => writes.listen(),
            Self::Failed(error) => return Err(Blocked::Failed(error.duplicate())),
        };
        match waiting {
            Some(event) => Err(Blocked::Wait(event)),
            None => {
                *self = Self::Active;
                Ok(())
            }
        }
    }

    /// Fails if it is unknown which tables are active on disk.
    ///
    /// # Errors
    /// The failure of the transaction.
    pub(crate) fn check_known(&self) -> Result<(), Error> {
        match self {
            Self::Failed(error) => Err(error.duplicate()),
            _ => Ok(()),
        }
    }
}

/// Wakes the waiting tasks when dropped.
#[derive(Default)]
pub(crate) struct ThawEvent(Event);

impl ThawEvent {
    /// Resolves when this event is dropped.
    pub(crate) fn listen(&self) -> EventListener {
        self.0.listen()
    }
}

impl Drop for ThawEvent {
    fn drop(&mut self) {
        self.0.notify(usize::MAX);
    }
}
