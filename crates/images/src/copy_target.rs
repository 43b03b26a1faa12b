//! Opens the target of a copy, with direct I/O if the host supports it for the file.

use std::path::Path;

use blockhouse_core::{Buffer, Durability, ErrorKind, Result, Storage};
use blockhouse_disk::{ImageDisk, is_on_fuse};
use blockhouse_engine::HostFile;

use crate::image_options::{CacheMode, ImageOptions};
use crate::open_image::open;

/// Opens the target of a copy for direct I/O, so that the copy evicts no other data from the cache.
/// Uses the page cache if the host has no direct I/O for the file, or its blocks exceed a cluster.
///
/// # Errors
/// As [`open`].
pub async fn open_copy_target(path: &Path, options: ImageOptions) -> Result<ImageDisk> {
    let cached = ImageOptions { cache: CacheMode::Writeback, ..options.clone() };
    match open(path, ImageOptions { cache: CacheMode::None, ..options }).await {
        Ok(disk) => {
            let file = disk.image().file();
            let is_direct = match file {
                Some(file) => takes_direct_writes(file).await,
                None => Ok(true),
            };
            if let Ok(true) = is_direct {
                return Ok(disk);
            }
            // Closed after a failed write, too: otherwise it stays marked as in use.
            let closed = disk.close().await;
            is_direct.and(closed)?;
        }
        Err(error) if matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::InvalidInput) => {}
        Err(error) => return Err(error),
    }
    open(path, cached).await
}

/// Whether the file takes a direct write of its first block, which is written as it is. Only files
/// on FUSE are tried: some (mergerfs) open a file for direct I/O, and refuse the first write.
async fn takes_direct_writes(file: &HostFile) -> Result<bool> {
    const BLOCK: u64 = 4096;
    if file.size() < BLOCK || !is_on_fuse(file.descriptor()).unwrap_or(false) {
        return Ok(true);
    }
    let mut block = Buffer::new(BLOCK as usize);
    let tried = async {
        file.read(0, block.lend()).await?;
        file.write(0, block.lend(), Durability::None).await
    };
    match tried.await {
        Err(error) if error.kind() == ErrorKind::InvalidInput => Ok(false),
        outcome => outcome.map(|()| true),
    }
}
