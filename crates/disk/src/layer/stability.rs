//! Marks of a layer that has unflushed writes, for flushes of the images on it (`unstable`).

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether a layer, and those behind it, have writes of this process that no flush
/// has covered.
pub(crate) struct Stability {
    /// Whether nothing that was written to it here may be lost, if others stand on it.
    is_stable: AtomicBool,
    /// Whether all behind it are stable.
    pub(super) is_behind_stable: AtomicBool,
}

impl Default for Stability {
    fn default() -> Self {
        Self { is_stable: AtomicBool::new(true), is_behind_stable: AtomicBool::new(true) }
    }
}

impl Stability {
    /// The image may have writes of this process that no flush has covered when others stand on it.
    pub(crate) fn set_unstable(&self) {
        self.is_stable.store(false, Ordering::SeqCst);
    }

    /// The image is durable, and is no longer changed.
    pub(crate) fn set_stable(&self) {
        self.is_stable.store(true, Ordering::SeqCst);
    }

    /// The image stands on one that may be unstable.
    pub(crate) fn set_unstable_behind(&self) {
        self.is_behind_stable.store(false, Ordering::SeqCst);
    }

    /// Every layer behind the image is stable: flushes of the image leave them out.
    pub(crate) fn set_stable_behind(&self) {
        self.is_behind_stable.store(true, Ordering::Release);
    }

    pub(super) fn is_stable(&self) -> bool {
        self.is_stable.load(Ordering::SeqCst)
    }
}
