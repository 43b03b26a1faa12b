//! The switch that refuses changes of a disk that was opened for writing (`access`).

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether changes of a disk that was opened for writing are refused. The switch is turned on while
/// no change is in flight, so every later change sees it.
#[derive(Default)]
pub(super) struct WriteProtection {
    is_on: AtomicBool,
    /// The disk's new location, if the disk may no longer be changed here.
    retired: OnceLock<String>,
}

impl WriteProtection {
    /// Whether changes are refused.
    pub(super) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// Refuses changes, or allows them again.
    pub(super) fn set(&self, is_on: bool) {
        self.is_on.store(is_on, Ordering::SeqCst);
    }

    /// Refuses changes from now on: the disk has moved to `moved_to`.
    pub(super) fn retire(&self, moved_to: String) {
        // The first location is kept.
        let _ = self.retired.set(moved_to);
        self.set(true);
    }

    /// The disk's new location, if it is retired.
    pub(super) fn retired_to(&self) -> Option<&str> {
        self.retired.get().map(String::as_str)
    }
}
