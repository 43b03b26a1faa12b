//! Reads whose bytes stay where they are: in the host's page cache.

use std::os::fd::BorrowedFd;

use blockhouse_core::metrics::clock;
use blockhouse_core::{ByteRange, ErrorKind, Result, Storage};

use super::Disk;
use crate::stats::{ExportKind, Operation};

impl<S: Storage> Disk<S> {
    /// A read of `range` into an empty pipe with room for it, without a copy
    /// ([`Storage::lend_pages`]). Returns how many bytes are in the pipe: all, or fewer where the
    /// read has to be [submitted](Self::submit), which this was none then: the image maps or
    /// decrypts, the disk has limits, or the host does not have all of it in memory. A change that
    /// is carried out before the bytes are taken out may show.
    pub fn lend_pages(&self, export: ExportKind, range: ByteRange, pipe: BorrowedFd<'_>) -> usize {
        if self.throttle.is_active() || self.copies_on_read() {
            return 0;
        }
        let image = self.begin_use();
        let length = range.length();
        let is_inside = image.check_end(range.offset(), length, ErrorKind::InvalidInput).is_ok();
        if !is_inside || !image.format().is_identity() {
            return 0;
        }
        let began = clock::now();
        let put = image.layer().data().lend_pages(range, pipe);
        if put as u64 == length {
            self.read_probes.note(range.offset(), length);
            let timer = self.request_stats().begin_operation(export, Operation::Read, length);
            timer.since(began).end::<()>(&Result::Ok(()));
        }
        put
    }
}
