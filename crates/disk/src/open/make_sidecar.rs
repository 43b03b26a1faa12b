//! Making the sidecar of a raw image (`sidecar`).
//!
//! Guarantee: a crash leaves the whole of it or none. What it is made of has a name of its own until it is durable; what an
//! earlier attempt left under that name is removed, while the image is locked.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use blockhouse_core::{Error, ErrorKind, Result, Storage, SyncMode, ToolProgress};
use blockhouse_engine::{HostFile, OpenMode, PageCache};
use blockhouse_format::ImageFormat;
use blockhouse_format::qcow2::{self, Sidecar};
use blockhouse_storage::Location;

use super::create::{create, format_by_name, part_of, remove_created, rename_finished};
use super::durable_rename::{IfExists, keep_rights, sync_folder};
use super::image_disk::ImageDisk;
use super::image_options::{ImageOptions, Locking};
use super::lock::lock;
use super::restore::{Clock, clock_of};
use super::sidecar::{Found, find, identity, is_file, open_found, sidecar_of};
use crate::options::Access;

/// Makes the sidecar of a raw image, without bitmaps, durably, unless it has one that belongs to it: whether it made one.
/// Nothing becomes of images of other formats, which have bitmaps of their own or none. Needs the loop of the current thread.
///
/// # Errors
/// `InvalidInput` for a sidecar that does not belong to the image, and for an image that is not in whole sectors;
/// `Unsupported` for one that is no file; `Locked`; the host's.
pub async fn make_sidecar(image: &Path, options: &ImageOptions) -> Result<bool> {
    let path = match (find(image, options).await?, Location::of(image)?) {
        (Found::Belongs { .. }, _) => return Ok(false),
        (Found::Strange(why), _) => return Err(why),
        (Found::Nothing, Location::File(path)) => path,
        (Found::Nothing, _) => return Ok(false),
    };
    if options.format.unwrap_or_else(|| format_by_name(&path)) != ImageFormat::Raw {
        return Ok(false);
    }
    let disk = HostFile::open(&path, options.open_mode(), PageCache::Used)?;
    if !is_file(&path) {
        let what = "a raw image has bitmaps only where it is a file, and named by its own path";
        let error = Error::new(ErrorKind::Unsupported, what).on(disk.name());
        return Err(error.hint(
            "name the file that a symbolic link leads to; a device needs a qcow2 image on it",
        ));
    }
    if options.locking == Locking::Held {
        lock(&disk, Access::ReadWrite)?;
    }
    if clock_of(&disk)? != Clock::ThisHost || disk.last_change().await?.is_none() {
        let what = "its file system does not tell exactly when other programs have changed it";
        let error = Error::new(ErrorKind::Unsupported, what).on(disk.name());
        return Err(error.hint("bitmaps of a raw image need that; use a qcow2 image"));
    }
    let sidecar = sidecar_of(&path);
    let part = part_of(&sidecar);
    if is_file(&part) {
        remove_created(&part).await;
    }
    create(&part, 0, ImageFormat::Raw).await?;
    let finished = fill(&disk, &path, &part, &sidecar).await;
    if finished.is_err() {
        remove_created(&part).await;
    }
    finished.map(|()| true)
}

/// Removes the sidecar by which a raw image is open for writing and locked, if it has no bitmap: what it was made for has
/// failed. The disk is closed next.
///
/// # Errors
/// The host's.
pub async fn remove_unused_sidecar(disk: &ImageDisk, image: &Path) -> Result<()> {
    match disk.file().filter(|_| disk.has_sidecar()) {
        Some(file) if disk.bitmaps().list().await?.is_empty() => remove_sidecar(image, file),
        _ => Ok(()),
    }
}

/// Removes the sidecar of an image, durably, which `file` is. Another file in its place stays.
///
/// # Errors
/// The host's.
pub(super) fn remove_sidecar(image: &Path, file: &HostFile) -> Result<()> {
    let sidecar = sidecar_of(image);
    let (_, found) = open_found(&sidecar)?;
    if identity(&found)? != identity(file)? {
        return Ok(());
    }
    std::fs::remove_file(&sidecar)
        .map_err(|error| Error::host("cannot remove it", error).on(file.name()))?;
    sync_folder(&sidecar)
}

async fn fill(disk: &HostFile, image: &Path, part: &Path, sidecar: &Path) -> Result<()> {
    let name = image.file_name().unwrap_or_default().as_bytes().to_vec();
    let made = Sidecar::create_options(disk.size(), name, identity(disk)?);
    let storage = HostFile::open(part, OpenMode::ReadWrite, PageCache::Used)?;
    qcow2::create_with(&storage, Some(disk), &made, &ToolProgress::default()).await?;
    // Users of the image may use its bitmaps.
    keep_rights(part, image)
        .map_err(|error| Error::host("cannot set its mode", error).on(storage.name()))?;
    storage.flush(SyncMode::Full).await?;
    storage.close().await?;
    rename_finished(part, sidecar, IfExists::Fail).await
}
