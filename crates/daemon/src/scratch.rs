//! Scratch files of backups: files without a name, in a folder of the operator's choice.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result};
use blockhouse_disk::{
    CacheMode, ImageDisk, ImageFormat, ImageOptions, Locking, create, open_without_backing,
};

/// Makes a disk of `size` bytes, all zeros, in a file in `folder`. The file has no name when this returns: its space is the
/// host's again when the disk is dropped, or the process ends.
///
/// # Errors
/// The host's.
pub(crate) async fn open_scratch(folder: &Path, size: u64) -> Result<ImageDisk> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let (process, number) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let path = folder.join(format!(".blockhouse-{process}-{number}.scratch"));
    create(&path, size, ImageFormat::Raw).await?;
    let options = ImageOptions {
        format: Some(ImageFormat::Raw),
        // What it holds is of no use after a crash.
        cache: CacheMode::Unsafe,
        locking: Locking::None,
        ..ImageOptions::default()
    };
    let opened = open_without_backing(&path, options).await;
    std::fs::remove_file(&path).with_context(|| {
        format!("{}: cannot take the name from the scratch file", path.display())
    })?;
    Ok(opened?)
}
