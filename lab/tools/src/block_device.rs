//! The kernel's answers about the block device that a folder is on, read without the engine: tests
//! compare the engine with it.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Whether a durable write to a file in `folder` may need a flush. It needs none if the kernel
/// reports that the device has FUA or no volatile cache (Documentation/ABI/stable/sysfs-block).
///
/// # Errors
/// `folder` cannot be looked up.
pub fn has_flushes_to_share(folder: &Path) -> io::Result<bool> {
    let number = folder.metadata()?.dev();
    let (major, minor) = (libc::major(number), libc::minor(number));
    let is = |attribute: &str, value: &str| {
        // A partition has no queue of its own: its disk, the folder above, has one.
        let text = ["queue", "../queue"].into_iter().find_map(|queue| {
            let path = format!("/sys/dev/block/{major}:{minor}/{queue}/{attribute}");
            std::fs::read_to_string(path).ok()
        });
        text.is_some_and(|text| text.trim() == value)
    };
    Ok(!is("fua", "1") && !is("write_cache", "write through"))
}
