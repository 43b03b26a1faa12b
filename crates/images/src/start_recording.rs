//! Starts recording the changes of a raw disk in use, in a side file (`side_file`) that is created
//! for it.
//!
//! Guarantees: after [`start_recording`] returns, every change goes through the side file, and is
//! recorded in bitmaps that are added later. The disk's file keeps its descriptors, so its locks
//! are never released, and a writeback error is reported to the same flushes as before. A crash at
//! any moment leaves the image unchanged, with no side file or with one without bitmaps. On failure
//! the disk continues as before. If the first bitmap cannot be added, the caller calls
//! [`stop_recording`], which undoes the change in the same way and removes the side file.

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use blockhouse_core::{Error, ErrorKind, Result, SyncMode, rare};
use blockhouse_disk::{Access, EarlierWrites, ImageDisk, Pause, StoredImage, flush_ahead};
use blockhouse_engine::{FileKind, HostFile, OpenMode, PageCache};
use blockhouse_format::ImageFormat;
use futures_util::future::LocalBoxFuture;

use crate::create::remove_created;
use crate::disk_over::disk_over;
use crate::image_options::{ImageOptions, Locking};
use crate::make_side_file::{make_side_file, remove_side_file};
use crate::restore::Restore;
use crate::side_file::{open_found, place_of};
use crate::volume::identity;
use crate::vouching::begin_vouching;

/// After this many replacements of a disk's image, [`stop_recording`] fails. Reason: the files of
/// replaced images stay open.
pub(crate) const MAX_REPLACED: usize = 32;

/// Whether `image` is a raw file, open for writing, whose changes are not recorded.
/// [`start_recording`] starts the recording.
pub fn lacks_side_file(image: &StoredImage) -> bool {
    let is_file = image.file().is_some_and(|file| file.kind() == FileKind::Regular);
    is_file && image.format().is_raw() && image.access() == Access::ReadWrite
}

/// Makes a side file for a disk in use that [lacks one](lacks_side_file), and records
/// its changes there from now on. Changes are held off for a few flushes. `image` and `options` are
/// the path and the options with which the disk was opened. Needs the event loop of the current
/// thread.
///
/// # Errors
/// As [`make_side_file`]; `InvalidInput` if another file has the path by now; a flush that failed
/// earlier.
pub fn start_recording<'a>(
    disk: &'a ImageDisk,
    image: &'a Path,
    options: &'a ImageOptions,
) -> LocalBoxFuture<'a, Result<Pause>> {
    rare(async move {
        disk.check_writable()?;
        let refuse = |what: &str| {
            Err(Error::new(ErrorKind::InvalidInput, what.to_owned())
                .on(&image.display().to_string()))
        };
        let Some(served) = disk.image().file() else {
            return refuse("is no file, and has no bitmaps");
        };
        if identity_at(image)? != identity(served)? {
            return refuse("is another file than the one that is in use, which had its path");
        }
        // The image is already locked.
        let unlocked = ImageOptions { locking: Locking::None, ..options.clone() };
        let is_new = make_side_file(image, &unlocked).await?;
        let recorded = record_beside(disk, served, image, options).await;
        if recorded.is_err() && is_new {
            remove_created(&place_of(image, options)).await;
        }
        recorded
    })
}

async fn record_beside(
    disk: &ImageDisk,
    served: &HostFile,
    image: &Path,
    options: &ImageOptions,
) -> Result<Pause> {
    let (recording, restore) = open_beside(disk, served, image, options).await?;
    let before = disk.format();
    flush_ahead(&[disk], SyncMode::Full).await?;
    let began = Instant::now();
    let quiesced = disk.quiesced().await?;
    // The disk may have become read-only since the first check.
    disk.check_writable()?;
    before.flush(SyncMode::Full).await?;
    // The side file stores the time of the image's last change. Up to here, the disk itself has
    // made all changes.
    recording.settle().await?;
    disk.check_replacement(&recording)?;
    let recording = restore.finish(recording).await?;
    begin_vouching(&recording, options);
    if let Some(data) = recording.format().data().storage().as_file() {
        served.move_locks_to(data);
    }
    let replaced = quiesced.record_in(Arc::new(recording))?;
    let pause = Pause { length: began.elapsed() };
    if let Err(error) = replaced.close().await {
        // The image's data was flushed before. If the error recurs, the next flush reports it.
        tracing::warn!("{error}");
    }
    Ok(pause)
}

/// Undoes [`start_recording`] for a disk without bitmaps: stops recording its changes and removes
/// its side file. `image` and `options` are as there. Any other disk is left unchanged. Needs the
/// event loop of the current thread.
///
/// # Errors
/// Errors of the storage or the host; `Unsupported` if this was done too often. The disk then
/// continues with its side file.
pub fn stop_recording<'a>(
    disk: &'a ImageDisk,
    image: &'a Path,
    options: &'a ImageOptions,
) -> LocalBoxFuture<'a, Result<()>> {
    rare(async move {
        let (image_used, before) = (disk.image(), disk.format());
        let (Some(side_file), Some(served)) =
            (image_used.file(), before.data().storage().as_file())
        else {
            return Ok(());
        };
        if !disk.image().has_side_file() || !disk.format().bitmaps()?.list().await?.is_empty() {
            return Ok(());
        }
        if disk.jobs().count_replaced() >= MAX_REPLACED {
            let what = "was replaced too often to give up its side file";
            let error = Error::new(ErrorKind::Unsupported, what).on(disk.image().image_name());
            return Err(error.hint("it has no bitmap: remove it when the disk is closed"));
        }
        let itself = served.share(image, options.open_mode())?;
        let (itself, restore) =
            disk_over(itself.into(), image, options, EarlierWrites::Unknown, None).await?;
        flush_ahead(&[disk], SyncMode::Full).await?;
        let quiesced = disk.quiesced().await?;
        disk.check_writable()?;
        before.flush(SyncMode::Full).await?;
        disk.check_replacement(&itself)?;
        let itself = restore.finish(itself).await?;
        if let Some(file) = itself.file() {
            served.move_locks_to(file);
        }
        let replaced = quiesced.record_in(Arc::new(itself))?;
        if let Err(error) = replaced.close().await {
            tracing::warn!("{error}");
        }
        remove_side_file(&place_of(image, options), side_file)
    })
}

fn identity_at(image: &Path) -> Result<[u8; 16]> {
    identity(&HostFile::open(image, OpenMode::ReadOnly, PageCache::Used)?)
}

/// Opens another disk over a raw disk's file, with its side file, which has no bitmaps yet.
async fn open_beside(
    disk: &ImageDisk,
    served: &HostFile,
    image: &Path,
    options: &ImageOptions,
) -> Result<(StoredImage, Restore)> {
    let path = place_of(image, options);
    let is_beside = options.side_file.is_none();
    let options = ImageOptions { format: Some(ImageFormat::Qcow2), ..options.clone() };
    let (found, _) = open_found(&path)?;
    let (mode, cache) = (options.open_mode(), options.cache.page_cache());
    let side_file = HostFile::open_found(found.as_fd(), &path, mode, cache)?;
    let opened = disk_over(side_file.into(), &path, &options, EarlierWrites::Unknown, None).await;
    let (opened, restore) = opened?;
    let refuse = |what: &str, hint: &'static str| {
        Err(Error::new(ErrorKind::InvalidInput, what.to_owned()).on(opened.name()).hint(hint))
    };
    let Some(mark) = opened.format().header().data_file_mark() else {
        return refuse("another program has changed the file while it was opened", "try again");
    };
    if mark.identity != identity(served)? || opened.size() != disk.size() {
        return refuse("belongs to another disk", "remove that file");
    }
    if opened.format().bitmaps()?.list().await?.iter().any(|bitmap| bitmap.is_enabled) {
        return refuse(
            "has bitmaps that lack the changes of the server which has the image",
            "remove that file, and make a full backup",
        );
    }
    // The name is the one in the side file, because the process that takes over the image at an
    // upgrade uses it, too.
    let name = image.file_name().map_or(OsStr::new("").as_bytes(), OsStr::as_bytes);
    let name = if is_beside {
        path.parent().unwrap_or(Path::new("")).join(OsStr::from_bytes(name))
    } else {
        image.to_owned()
    };
    let data = served.share(&name, mode)?;
    Ok((opened.with_data(data.into())?, restore))
}
