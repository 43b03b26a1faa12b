//! The file of a copy that is not complete yet.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use blockhouse_disk::ImageFormat;
use blockhouse_images::{CacheMode, ImageOptions, StateUse, exists, open, part_of, remove_created};
use blockhouse_storage::Location;

use crate::called_as;

/// The file that becomes the image at `path` when its copy is complete. Under the name qemu-img, a
/// file that a killed copy has left is removed, so the file has a name that no user chooses.
///
/// # Errors
/// A copy is running; otherwise, an earlier copy has left its file, and `advice` says what to do.
pub async fn unfinished(path: &Path, advice: &str) -> Result<PathBuf> {
    let part = match (called_as::is_qemu_img(), path.file_name(), Location::of(path)?) {
        (true, Some(name), Location::File(_)) => {
            let mut hidden = OsString::from(".");
            hidden.push(name);
            part_of(&path.with_file_name(hidden))
        }
        (true, _, Location::Rbd(image)) => {
            let hidden = format!(".{}", image.image());
            part_of(Path::new(&image.with_image(&hidden).to_string()))
        }
        _ => part_of(path),
    };
    if !exists(&part).await? {
        return Ok(part);
    }
    if !called_as::is_qemu_img() {
        bail!("{}: is left of an earlier copy; {advice}", part.display());
    }
    // The opening fails if a running copy has locked the file.
    let options = ImageOptions {
        format: Some(ImageFormat::Raw),
        cache: CacheMode::Writeback,
        state: StateUse::Off,
        ..ImageOptions::default()
    };
    open(&part, options).await?.close().await?;
    remove_created(&part).await;
    Ok(part)
}
