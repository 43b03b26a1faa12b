//! New images on the host.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use blockhouse_core::{Error, ErrorKind, Result};
use blockhouse_engine::{HostFile, PageCache};
use blockhouse_format::{ImageFormat, initial_file_size};

use super::durable_rename::sync_folder;

/// Makes a new image of `size` bytes, all holes, durably. Needs the loop of the current thread.
///
/// # Errors
/// One that names the file: the size is no multiple of 512, the file exists, or the host refuses.
/// A file that could not be finished is removed.
pub async fn create(path: &Path, size: u64, format: ImageFormat) -> Result<()> {
    check_new_name(path)?;
    if !size.is_multiple_of(512) {
        let what = format!("a disk of {size} bytes is no multiple of 512");
        return Err(Error::new(ErrorKind::InvalidInput, what).on(&path.display().to_string()));
    }
    let file = HostFile::create(path, initial_file_size(format, size), PageCache::Used)?;
    let finish = async {
        blockhouse_format::create(&file, format, size).await?;
        sync_folder(path)
    };
    finish.await.inspect_err(|_| {
        // The error that counts is the first one.
        let _ = std::fs::remove_file(path);
    })
}

/// Refuses the name of a new file in the folder of devices: it is a mistyped device, mostly, and the file
/// would take memory and be gone after a restart. File systems mounted below (`/dev/shm`) are none.
///
/// # Errors
/// `InvalidInput`.
pub fn check_new_name(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let devices = Path::new("/dev");
    let is_among_devices = || {
        let folder = folder.unwrap_or(Path::new(".")).canonicalize().ok()?;
        let is_one_file_system = folder.metadata().ok()?.dev() == devices.metadata().ok()?.dev();
        Some(folder.starts_with(devices) && is_one_file_system)
    };
    if !is_among_devices().unwrap_or(false) {
        return Ok(());
    }
    let what = "there is no such device, and a new file among the devices would be lost";
    Err(Error::new(ErrorKind::InvalidInput, what)
        .on(&path.display().to_string())
        .hint("check the name of the device, or choose a path outside /dev"))
}
