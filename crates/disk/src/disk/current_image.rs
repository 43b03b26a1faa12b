//! The image that a disk's requests go to, kept open for as long as one of them uses it.

use blockhouse_core::Storage;
use blockhouse_format::Format;

use super::Disk;
use super::image_use::UseGuard;
use crate::durability::FlushTracker;
use crate::layer::Layer;
use crate::write::Writer;

/// The image that a disk's requests go to, or went to when this was made: it stays open until this
/// is dropped.
pub(crate) struct ImageUse<'a, S: Storage> {
    image: &'a Disk<S>,
    _guard: UseGuard<'a>,
}

impl<S: Storage> ImageUse<'_, S> {
    pub(crate) fn layer(&self) -> &Layer<S> {
        self.image.own_layer()
    }

    pub(crate) fn format(&self) -> &Format<FlushTracker<S>> {
        self.layer().format()
    }

    pub(super) fn writer(&self) -> &Writer<S> {
        &self.image.writer
    }
}

impl<S: Storage> Disk<S> {
    /// The image of now, for what does not hold off that another one takes its place.
    pub(crate) fn begin_use(&self) -> ImageUse<'_, S> {
        loop {
            let image = self.current();
            let guard = image.uses.begin();
            // It may have been replaced, and be closed, before the guard was seen.
            if guard.is_none() || std::ptr::eq(image, self.current()) {
                return ImageUse { image, _guard: guard };
            }
        }
    }
}
