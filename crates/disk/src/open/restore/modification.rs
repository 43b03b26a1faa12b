//! Whether an image's file is as its server left it, by the time of its last modification.

use std::time::Duration;

use rustix::fs::{FileType, Stat};

use crate::state::StatePage;

/// How much later than the last write a file may be modified: the clock of file systems has ticks, and a write is
/// stamped a moment before and after it is made.
const MODIFICATION_SLACK: Duration = Duration::from_secs(2);

/// Why a file is not as its server left it, by the time of its last modification. Of a block device there is none.
pub(crate) fn modified_since(status: &Stat, page: &StatePage) -> Option<String> {
    if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
        return None;
    }
    let modified = modification_time(status)?;
    let written = Duration::from_nanos(page.last_write());
    let later = modified.checked_sub(written)?;
    (later > MODIFICATION_SLACK).then(|| {
        let seconds = later.as_secs();
        format!("another program has modified the image since ({seconds} s after its server's last write)")
    })
}

/// Since the Unix epoch; `None` for a time before it.
pub(crate) fn modification_time(status: &Stat) -> Option<Duration> {
    Some(Duration::new(status.st_mtime.try_into().ok()?, status.st_mtime_nsec as u32))
}
