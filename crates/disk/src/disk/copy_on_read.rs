//! Copy on read: a read, or a client's prefetch request, copies data from the backing file into the
//! image.
//!
//! Guarantees: as `write/copy_on_read`. A read never waits for a change of the whole image, and
//! such a change never waits for the backing file: data that is read during such a change is not
//! copied. Nothing is copied while the disk is read-only or its backing file is open for writing,
//! nor into an image that was replaced.

use std::sync::atomic::Ordering;

use blockhouse_core::{ByteRange, ErrorKind, IoVector, Result, Storage};

use super::Disk;
use super::in_flight::RequestInFlight;
use super::quiesce::WriteGuard;
use crate::options::Access;
use crate::write::Writer;

impl<S: Storage> Disk<S> {
    /// Whether reads copy from the backing file into the image now.
    pub fn copies_on_read(&self) -> bool {
        self.image().options.copy_on_read
            && self.image().layer().backing_layer().is_some()
            && self.access() == Access::ReadWrite
            && self.jobs().base().is_none()
    }
}

impl<'a, S: Storage> RequestInFlight<'a, S> {
    /// Reads from `offset` on, and populates the range from the backing file.
    pub(super) async fn copy_on_read(self, offset: u64, into: IoVector) -> Result<()> {
        let range =
            self.disk.image().check_end(offset, into.len() as u64, ErrorKind::InvalidInput)?;
        if range.is_empty() {
            return Ok(());
        }
        let failed = |error| {
            // Logged only once, because a guest may read on for a long time.
            if !self.disk.has_failed_to_populate.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    "what is read from the backing file cannot be kept, and may be fetched again: {error}"
                );
            }
        };
        let image = self.disk.begin_use();
        let writer = image.writer();
        writer.read_and_populate(range, into, &|| self.begin_copy(writer), &failed).await
    }

    /// Populates a range before it is read.
    ///
    /// # Errors
    /// Errors of the backing file or the image.
    pub(super) async fn copy_ahead(self, range: ByteRange) -> Result<()> {
        let image = self.disk.begin_use();
        let writer = image.writer();
        writer.populate_all(range, &|| self.begin_copy(writer)).await
    }

    /// Begins the write of a copy, if the disk still copies on read into the image of `writer`,
    /// which served the read.
    fn begin_copy(self, writer: &Writer<S>) -> Option<WriteGuard<'a>> {
        let guard = self.disk.quiesce.try_begin_write();
        // While the guard is held, the result of these checks stays true.
        guard.filter(|_| {
            self.disk.copies_on_read() && std::ptr::eq(writer, self.disk.image().writer())
        })
    }
}
