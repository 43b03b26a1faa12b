//! Scratch files of backups: files without a name, in a folder of the operator's choice.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result};
use blockhouse_disk::{ImageDisk, ImageFormat};
use blockhouse_images::{CacheMode, ImageOptions, Locking, Purpose, create, exists, open};

/// Creates a disk of `size` zero bytes in an unlinked file in `folder`. The host frees its space
/// when the disk is dropped or the process ends.
///
/// # Errors
/// The host's error.
pub(crate) async fn open_scratch(folder: &Path, size: u64) -> Result<ImageDisk> {
    let path = create_file(folder, size).await?;
    let options = |cache| ImageOptions {
        format: Some(ImageFormat::Raw),
        cache,
        locking: Locking::None,
        purpose: Purpose::Image,
        ..ImageOptions::default()
    };
    // Direct I/O, because the data of long sequential writes is read only once, and the page cache
    // would only add a copy. If the file system has no direct I/O, the page cache is used. The file
    // is never flushed, because it is useless after a crash.
    let opened = match open(&path, options(CacheMode::None)).await {
        Ok(disk) => Ok(disk),
        Err(_) => open(&path, options(CacheMode::Unsafe)).await,
    };
    std::fs::remove_file(&path).with_context(|| {
        format!("{}: cannot take the name from the scratch file", path.display())
    })?;
    Ok(opened?)
}

/// Makes the file under an unused name. A killed process with the same process ID may have left a
/// file.
async fn create_file(folder: &Path, size: u64) -> Result<PathBuf> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let process = std::process::id();
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!(".blockhouse-{process}-{number}.scratch"));
        // If another process creates the file after this check, `create` fails.
        if !exists(&path).await? {
            create(&path, size, ImageFormat::Raw).await?;
            return Ok(path);
        }
    }
}
