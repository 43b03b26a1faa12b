//! Counts the images over a layer, and says whether more may be opened over it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The images over a layer in this process.
#[derive(Default)]
pub struct Stands {
    count: AtomicUsize,
    /// Disks whose current image this layer is.
    disks: AtomicUsize,
    is_kept: AtomicBool,
}

impl Stands {
    /// The number of images over the layer.
    pub fn count(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }

    /// Counts one more image.
    pub fn enter(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    /// Counts one image less.
    pub fn leave(&self) {
        self.count.fetch_sub(1, Ordering::SeqCst);
    }

    /// Counts one more disk that has the layer as its current image.
    pub(crate) fn enter_disk(&self) {
        self.disks.fetch_add(1, Ordering::SeqCst);
    }

    /// Counts one disk less.
    pub(crate) fn leave_disk(&self) {
        self.disks.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether the layer has no image over it, and is the current image of no disk.
    pub(crate) fn is_unused(&self) -> bool {
        self.count() == 0 && self.disks.load(Ordering::SeqCst) == 0
    }

    /// Whether an image that is being opened may use the layer. The caller has
    /// [counted](Self::enter) the image before. The caller of [`keep`](Self::keep) reads the count
    /// after that call, so at least one of the two callers sees the other.
    pub fn may_grow(&self) -> bool {
        !self.is_kept.load(Ordering::SeqCst)
    }

    /// Forbids the layer to images that are opened later, because the locks of the layer's file are
    /// about to be released.
    pub fn keep(&self) {
        self.is_kept.store(true, Ordering::SeqCst);
    }
}
