//! An image that a tool looks into: the disk for the rules of opening and locking, and beside it,
//! for qcow2, the tables.

use std::path::Path;

use anyhow::Result;
use blockhouse_disk::{
    Access, CacheMode, DetectZeroes, Discard, Disk, ImageFormat, ImageOptions, Locking, open_alone,
};
use blockhouse_engine::{HostFile, OpenFor, PageCache};
use blockhouse_format::{Qcow2, qcow2};

/// An image that is open for reading.
pub struct ImageFile {
    /// The disk without what stands behind it. It holds the lock, if there is one.
    pub disk: Disk<HostFile>,
    /// The tables, if the format has some.
    pub tables: Option<Qcow2<HostFile>>,
}

/// Opens an image through the page cache, where clusters may be smaller than the host's blocks. Needs
/// the loop of the current thread.
///
/// # Errors
/// As [`open_alone`].
pub async fn open(path: &Path, format: Option<ImageFormat>, locking: Locking) -> Result<ImageFile> {
    let options = ImageOptions {
        format,
        access: Access::ReadOnly,
        cache: CacheMode::Writeback,
        discard: Discard::Unmap,
        detect_zeroes: DetectZeroes::Off,
        locking,
    };
    let disk = open_alone(path, options).await?;
    let tables = match format.unwrap_or_else(|| ImageFormat::by_name(path)) {
        ImageFormat::Raw => None,
        ImageFormat::Qcow2 => {
            let file = HostFile::open(path, OpenFor::Reading, PageCache::Used)?;
            let access = qcow2::Access::ReadOnly;
            Some(Qcow2::open(file, qcow2::OpenOptions { access, ..Default::default() }).await?)
        }
    };
    Ok(ImageFile { disk, tables })
}
