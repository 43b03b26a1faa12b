//! An image opened without its backing file (`backing: null` in QEMU's JSON).
//!
//! Guarantees: clusters that are not allocated in the image read as zeros, and their block status
//! is a hole. Written zeros are stored as zero clusters, so that they still read as zeros when the
//! image is opened with its backing file again.

use std::os::fd::AsRawFd;
use std::path::Path;

use blockhouse_core::{Error, Result};
use blockhouse_engine::{HostFile, OpenMode, PageCache};
use blockhouse_format::ImageFormat;

use blockhouse_disk::{Access, Image, Options, StoredImage};

/// Replaces the disk's backing file, if it has one, by an empty disk.
///
/// # Errors
/// The host's, if there is no memory.
pub(crate) async fn without_backing(disk: StoredImage) -> Result<StoredImage> {
    if disk.backing_file().is_none() {
        return Ok(disk);
    }
    let failed = |error: rustix::io::Errno| {
        Error::host("cannot leave its backing file out", error.into()).on(disk.name())
    };
    let memory = rustix::fs::memfd_create("nothing", rustix::fs::MemfdFlags::CLOEXEC);
    let memory = memory.map_err(failed)?;
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    let file = HostFile::open(Path::new(&path), OpenMode::ReadOnly, PageCache::Used)?;
    let read_only = Options { access: Access::ReadOnly, ..Options::default() };
    let nothing = Image::open(file.into(), ImageFormat::Raw, read_only).await?;
    let disk = disk.with_backing(&nothing);
    // Every offset counts as inside the backing file. Past its end, the format would not store
    // zeros.
    disk.format().set_backing_size(u64::MAX);
    Ok(disk)
}
