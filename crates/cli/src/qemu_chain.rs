//! The check of qemu-img that the backing files of an image are there and free. Scripts run `check`
//! and `snapshot` on an overlay before they delete the files that they have copied.
//!
//! Guarantee: a backing file that this program does not open, because the image may not name it or
//! its format is not supported, is no error as long as a file has its name. Under its own name this
//! program needs no backing file to work on the image itself.

use std::path::{Path, PathBuf};

use anyhow::Result;
use blockhouse_core::{Error, ErrorKind};
use blockhouse_disk::Access;
use blockhouse_images::{
    AllowedPaths, BackingUse, CacheMode, ImageOptions, Locking, Purpose, StateUse, is_address,
    open, plain_backing,
};

use crate::called_as;
use crate::image_args::resolve_relative;
use crate::qemu_words::is_of_chain;

/// Under the name qemu-img, opens the chain of an image, and closes it again. `options` are those
/// that the image will be opened with.
///
/// # Errors
/// A backing file is missing, in use, or no image of its format, or the chain is a loop. Errors of
/// the image itself are left to the caller, who opens it.
pub async fn check_chain(path: &Path, options: &ImageOptions) -> Result<()> {
    if !called_as::is_qemu_img() || options.backing_use == BackingUse::LeftOut {
        return Ok(());
    }
    let (access, state, cache) = (Access::ReadOnly, StateUse::Off, CacheMode::Writeback);
    let options = ImageOptions { access, state, cache, ..options.clone() };
    match open(path, options.clone().for_purpose(Purpose::Chain)).await {
        Ok(_) => Ok(()),
        Err(error) if is_of_chain(&error) && error.kind() != ErrorKind::Unsupported => {
            Err(error.into())
        }
        // The image itself is in use.
        Err(error) if error.kind() == ErrorKind::Locked => Ok(()),
        Err(error) => check_names(path, options, error.path()).await,
    }
}

/// Looks for a missing backing file from the image down to the image at `last`, whose backing file
/// is not opened.
async fn check_names(path: &Path, options: ImageOptions, last: Option<&str>) -> Result<()> {
    let options = ImageOptions { locking: Locking::None, ..options }.for_purpose(Purpose::Metadata);
    let (mut image, mut options) = (path.to_owned(), options);
    let mut above: Vec<PathBuf> = Vec::new();
    loop {
        let Ok(disk) = open(&image, options.clone()).await else { return Ok(()) };
        let Some(backing) = disk.image().backing_file() else { return Ok(()) };
        let Ok((backing, part)) = plain_backing(backing, disk.name()) else { return Ok(()) };
        if is_address(&backing.name) {
            return Ok(());
        }
        let file = resolve_relative(&image, &backing.name);
        let is_free = AllowedPaths::is_free_to_name(&image, &backing.name);
        above.push(image);
        if let Err(error) = std::fs::metadata(&file)
            && error.kind() == std::io::ErrorKind::NotFound
        {
            return Err(missing(&above, &file, error).into());
        }
        let is_last = above.last().and_then(|image| image.to_str()) == last;
        let format = backing.format.as_deref().and_then(|format| format.parse().ok());
        if is_last || !is_free || format.is_none() {
            return Ok(());
        }
        options = ImageOptions { format, ..options }.in_part(part);
        image = file;
    }
}

/// The error of a chain whose last file is missing.
fn missing(above: &[PathBuf], file: &Path, error: std::io::Error) -> Error {
    let above: Vec<_> = above.iter().map(|image| image.display().to_string()).collect();
    let error = Error::host("cannot open", error).on(&file.display().to_string());
    let what = format!("cannot open what is behind {}: {error}", above.join(" -> "));
    Error::new(error.kind(), what)
}
