//! Reads whose bytes an export takes directly from the host's page cache.

use std::os::fd::BorrowedFd;

use blockhouse_core::{ByteRange, ErrorKind, Storage};

use super::Disk;
use crate::options::Access;

impl<S: Storage> Disk<S> {
    /// The file of this host that has the bytes of `range` at the same offsets, if a read needs
    /// only this file: the image is raw and open for reading only, the disk has no rate limits, and
    /// all the bytes are in the page cache ([`Storage::cached_file`]).
    ///
    /// Reason for reading only: a client may receive pages of the file long after the read, and
    /// until then nothing may overwrite them.
    pub fn cached_file(&self, range: ByteRange) -> Option<BorrowedFd<'_>> {
        let image = self.image();
        let is_plain = image.access() == Access::ReadOnly && image.format().is_identity();
        if !is_plain || self.throttle.is_active() || range.is_empty() {
            return None;
        }
        image.check_end(range.offset(), range.length(), ErrorKind::InvalidInput).ok()?;
        let file = image.layer().data().cached_file(range)?;
        self.read_probes.note(range.offset(), range.length());
        Some(file)
    }
}
