//! Writes out bytes of a block device that are only in the page cache.
//!
//! When the kernel zeroes or discards a range, it first drops the range's pages, including dirty
//! ones. If the process is killed in between, the device has its older data, and acknowledged
//! writes are lost. So dirty pages are written out first. Another reason: the kernel counts a write
//! to a device (`device_writes`) only once it is written out.
//!
//! Guarantee: when the call returns, all earlier writes to the range have reached the device. They
//! are stable only after a flush. The next flush also reports a failure seen here, because it uses
//! another open file if the page cache may hold written data (`HostFile::flushed`).

use std::sync::Arc;

use blockhouse_core::ByteRange;

use crate::driver::file::File;
use crate::driver::thread_pool::blocking;

/// # Errors
/// The host's error, also if pages could not be written out since the file was opened.
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
