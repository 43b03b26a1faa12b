//! Makes the side file of a raw image (`side_file`).
//!
//! Guarantee: a crash leaves a complete side file or none. The new file has a temporary name until
//! it is durable. A file of an earlier attempt under that name is removed while the image is
//! locked.

use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use blockhouse_core::{Error, ErrorKind, Result, Storage, SyncMode, ToolProgress, rare};
use blockhouse_disk::{Access, ImageDisk};
use blockhouse_engine::{FileKind, HostFile, OpenMode, PageCache};
use blockhouse_format::ImageFormat;
use blockhouse_format::qcow2::{self, SideFileHeader};
use blockhouse_storage::{ImageStorage, Location};
use futures_util::future::LocalBoxFuture;

use crate::create::{create, part_of, remove_created, rename_finished};
use crate::durable_rename::{IfExists, keep_rights, sync_folder};
use crate::handed_over::Files;
use crate::image_options::{ImageOptions, Locking};
use crate::lock::lock;
use crate::open_location::open_location;
use crate::probe_check::{check_not_probed, format_by_name};
use crate::restore::{Clock, clock_of};
use crate::side_file::{Found, RawImage, close_volume, find, is_file, open_found, place_of};
use crate::volume::{Volume, identity};

/// Makes the side file of a raw image durably, without bitmaps, unless the image has a valid one.
/// Returns whether it made one. Images of other formats stay unchanged: the format stores bitmaps,
/// or has none. Needs the event loop of the current thread.
///
/// # Errors
/// `InvalidInput` for a side file of another image, for an image whose size is not in whole
/// sectors, and for an image of no given format that looks like another format than raw;
/// `Unsupported` for an image that is not a file, unless the user names the side file; `Locked`;
/// host errors.
pub fn make_side_file<'a>(
    image: &'a Path,
    options: &'a ImageOptions,
) -> LocalBoxFuture<'a, Result<bool>> {
    rare(async move {
        if !is_raw(image, options) {
            return match &options.side_file {
                // A folder is for several images, and some of them need no side file.
                Some(side) if !side.path.is_dir() => {
                    let what = "has no use for a file of bitmaps: only raw images have";
                    let error = Error::new(ErrorKind::InvalidInput, what);
                    Err(error.on(&image.display().to_string()).hint("leave --bitmaps out"))
                }
                _ => Ok(false),
            };
        }
        match find(image, options).await? {
            Found::Belongs { image: RawImage::Volume(_, volume), .. } => {
                close_volume(volume).await?;
                return Ok(false);
            }
            Found::Belongs { .. } => return Ok(false),
            Found::Strange(why) => return Err(why),
            Found::Nothing => {}
        }
        let volume = match Location::of(image)? {
            Location::File(path) => open_to_lock(&path, options)?.into(),
            _ if options.side_file.is_none() => return Ok(false),
            _ => open_location(&mut Files::Host, image, options).await?.0,
        };
        let made = make_beside(image, &volume, options).await;
        volume.close().await?;
        made.map(|()| true)
    })
}

/// As [`make_side_file`], but only if no file has the side file's path. The opening of the image
/// decides whether an existing file is used.
///
/// # Errors
/// As [`make_side_file`].
pub fn make_missing_side_file<'a>(
    image: &'a Path,
    options: &'a ImageOptions,
) -> LocalBoxFuture<'a, Result<()>> {
    rare(async move {
        let is_there =
            is_raw(image, options) && place_of(image, options).symlink_metadata().is_ok();
        if !is_there {
            make_side_file(image, options).await?;
        }
        Ok(())
    })
}

fn is_raw(image: &Path, options: &ImageOptions) -> bool {
    options.format.unwrap_or_else(|| format_by_name(image)) == ImageFormat::Raw
}

fn open_to_lock(path: &Path, options: &ImageOptions) -> Result<HostFile> {
    let disk = HostFile::open(path, options.open_mode(), PageCache::Used)?;
    if !is_file(path) && options.side_file.is_none() {
        let what = "a raw image has bitmaps only where it is a file, and named by its own path, or --bitmaps says where they are";
        let error = Error::new(ErrorKind::Unsupported, what).on(disk.name());
        return Err(error.hint(
            "name the file that a symbolic link leads to; of a device, a file for them: --bitmaps FILE",
        ));
    }
    if options.locking == Locking::Held {
        lock(&disk, Access::ReadWrite)?;
    }
    Ok(disk)
}

async fn make_beside(image: &Path, volume: &ImageStorage, options: &ImageOptions) -> Result<()> {
    // A disk with a side file is raw for all commands from now on.
    if options.format.is_none() {
        check_not_probed(volume, image, ImageFormat::Raw).await?;
    }
    if let Some(file) = volume.as_file().filter(|file| file.kind() == FileKind::Regular)
        && (clock_of(file)? != Clock::ThisHost || file.last_change().await?.is_none())
    {
        let what = "its file system does not tell exactly when other programs have changed it";
        let error = Error::new(ErrorKind::Unsupported, what).on(file.name());
        return Err(error.hint("bitmaps of a raw image need that; use a qcow2 image"));
    }
    let side_file = place_of(image, options);
    if side_file.symlink_metadata().is_ok() {
        let what = "is no regular file, so it cannot be the file of bitmaps";
        let error = Error::new(ErrorKind::InvalidInput, what).on(&side_file.to_string_lossy());
        return Err(error.hint("remove it, or name another file: --bitmaps FILE"));
    }
    let part = part_of(&side_file);
    if is_file(&part) {
        remove_created(&part).await;
    }
    create(&part, 0, ImageFormat::Raw).await?;
    let finished = fill(volume, image, &part, &side_file, options).await;
    if finished.is_err() {
        remove_created(&part).await;
    }
    finished
}

/// Removes the side file of a raw image, if the side file has no bitmap. For an operation that made
/// the side file and then failed. The image is open for writing through this side file, and locked;
/// the caller closes the disk next.
///
/// # Errors
/// The host's.
pub fn remove_unused_side_file<'a>(
    disk: &'a ImageDisk,
    image: &'a Path,
    options: &'a ImageOptions,
) -> LocalBoxFuture<'a, Result<()>> {
    rare(async move {
        match disk.image().file().filter(|_| disk.image().has_side_file()) {
            Some(file) if disk.format().bitmaps()?.list().await?.is_empty() => {
                remove_side_file(&place_of(image, options), file)
            }
            _ => Ok(()),
        }
    })
}

/// Removes the side file at this path durably, if it still is `file`. Any other file at the path
/// stays.
///
/// # Errors
/// The host's.
pub(crate) fn remove_side_file(side_file: &Path, file: &HostFile) -> Result<()> {
    let (_, found) = open_found(side_file)?;
    if identity(&found)? != identity(file)? {
        return Ok(());
    }
    std::fs::remove_file(side_file)
        .map_err(|error| Error::host("cannot remove it", error).on(file.name()))?;
    sync_folder(side_file)
}

/// The image's name in its side file: the file's name if the side file is beside the image;
/// otherwise a full path, so that other programs find the image.
fn name_of(image: &Path, options: &ImageOptions) -> Vec<u8> {
    if options.side_file.is_none() {
        return image.file_name().unwrap_or_default().as_bytes().to_vec();
    }
    let whole = match Location::of(image) {
        Ok(Location::File(path)) => std::path::absolute(&path).unwrap_or(path),
        _ => image.to_owned(),
    };
    whole.into_os_string().into_vec()
}

async fn fill(
    volume: &ImageStorage,
    image: &Path,
    part: &Path,
    side_file: &Path,
    options: &ImageOptions,
) -> Result<()> {
    let Volume { identity, size, .. } = Volume::of(volume).await?;
    let made = SideFileHeader::create_options(size, name_of(image, options), identity);
    let storage = HostFile::open(part, OpenMode::ReadWrite, PageCache::Used)?;
    let storage = ImageStorage::from(storage);
    qcow2::create_with(&storage, Some(volume), &made, &ToolProgress::default()).await?;
    // The users who may open the image may use its bitmaps.
    keep_rights(part, image)
        .map_err(|error| Error::host("cannot set its mode", error).on(storage.name()))?;
    storage.flush(SyncMode::Full).await?;
    storage.close().await?;
    // The hint of the failed rename names the part, which is removed after an error.
    rename_finished(part, side_file, IfExists::Fail).await.map_err(|error| error.hint("try again"))
}
