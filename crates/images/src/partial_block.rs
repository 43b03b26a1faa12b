//! Images whose file ends inside a block, because a server that used the page cache was killed.
//!
//! With O_DIRECT such a file is written in blocks of a page (`engine/host_file`). The clusters of
//! an image may be smaller than a block.

use std::path::Path;

use blockhouse_core::{Buffer, Result, Storage};
use blockhouse_disk::{Access, Disk, Options};
use blockhouse_engine::{HostFile, OpenMode};
use blockhouse_format::{ImageFormat, probe};

use crate::image_options::ImageOptions;

/// Whether the file of a qcow2 image ends inside a block, and its clusters are smaller than a
/// block. False for an image whose file is cut off, because such an image must not be changed.
///
/// # Errors
/// As opening the image for reading.
pub(crate) async fn has_small_clusters(
    file: &HostFile,
    path: &Path,
    options: &ImageOptions,
) -> Result<bool> {
    if !file.has_partial_block() {
        return Ok(false);
    }
    let block = file.capabilities().alignment.offset;
    let mut first = Buffer::new(probe::LENGTH.next_multiple_of(block as usize));
    file.read(0, first.lend()).await?;
    // Clusters of nearly all images are no smaller than a block. Then the image need not be opened
    // a second time.
    if probe::qcow2_cluster_size(first.bytes()).is_none_or(|size| size >= u64::from(block)) {
        return Ok(false);
    }
    let reader = HostFile::open(path, OpenMode::ReadOnly, options.cache.page_cache())?;
    let read_only = Options { access: Access::ReadOnly, ..Options::default() };
    let disk = Disk::open(reader, ImageFormat::Qcow2, read_only).await?;
    let is_small = disk.image().cluster_size().is_some_and(|size| size < u64::from(block));
    Ok(is_small && disk.image().features().is_none_or(|features| features.truncation.is_none()))
}
