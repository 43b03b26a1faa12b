//! Bytes of a block device that are in the page cache alone, written out to the device.
//!
//! The kernel drops the pages of a range that it zeroes or discards *before* it does so, also pages
//! that are not written out yet. A process that is killed in between would leave what the device
//! had before them, older than what was answered. So pages are written out first. Nor does the
//! kernel count what was written to a device before it is there (`device_writes`).
//!
//! Guarantee: what was written to the range before the call is at the device when it returns. It is
//! not stable: that takes a flush. A failure is reported to the next flush all the same, which goes
//! by another open file where the page cache has bytes of ours (`HostFile::flushed`).

use std::sync::Arc;

use blockhouse_core::ByteRange;

use crate::driver::file::File;
use crate::driver::thread_pool::blocking;

/// # Errors
/// The host's; pages that could not be written since the file was opened.
pub(super) async fn write_out(file: &Arc<File>, range: ByteRange) -> std::io::Result<()> {
    let file = Arc::clone(file);
    blocking(move || {
        let (start, length) = (range.offset() as i64, range.length() as i64);
        let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE
            | libc::SYNC_FILE_RANGE_WRITE
            | libc::SYNC_FILE_RANGE_WAIT_AFTER;
        loop {
            // SAFETY: the call takes numbers alone; the file is open as long as `file` lives.
            if unsafe { libc::sync_file_range(file.raw(), start, length, flags) } == 0 {
                return Ok(());
            }
            let error = std::io::Error::last_os_error();
            if error.kind() != std::io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    })
    .await
}
