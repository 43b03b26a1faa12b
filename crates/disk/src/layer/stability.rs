//! Marks of a layer that has unflushed writes, for flushes of the images over it (`unstable`).

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether a layer, and its backing files, have writes of this process that no flush has covered.
pub struct Stability {
    /// Whether all writes of this process to the layer are durable, if other images are over it.
    is_stable: AtomicBool,
    /// Whether all of the layer's backing files are stable.
    pub(super) is_behind_stable: AtomicBool,
}

impl Default for Stability {
    fn default() -> Self {
        Self { is_stable: AtomicBool::new(true), is_behind_stable: AtomicBool::new(true) }
    }
}

impl Stability {
    /// Notes that other images are over the image now, and that the image may have writes of this
    /// process that no flush has covered.
    pub(crate) fn set_unstable(&self) {
        self.is_stable.store(false, Ordering::SeqCst);
    }

    /// Notes that the image is durable, and is no longer changed.
    pub(crate) fn set_stable(&self) {
        self.is_stable.store(true, Ordering::SeqCst);
    }

    /// Notes that the image has a backing file that may be unstable.
    pub(crate) fn set_unstable_behind(&self) {
        self.is_behind_stable.store(false, Ordering::SeqCst);
    }

    /// Notes that all backing files of the image are stable: flushes of the image skip them.
    pub fn set_stable_behind(&self) {
        self.is_behind_stable.store(true, Ordering::Release);
    }

    pub(super) fn is_stable(&self) -> bool {
        self.is_stable.load(Ordering::SeqCst)
    }
}
