//! New images: files of this host, and images in Ceph.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use blockhouse_core::{Error, ErrorKind, Result, Storage, SyncMode, ToolProgress, rare};
use blockhouse_disk::fnv;
use blockhouse_engine::{HostFile, NewFile, OpenMode, PageCache};
use blockhouse_format::qcow2::{self, CreateOptions};
use blockhouse_format::{ImageFormat, initial_file_size};
use blockhouse_storage::{
    ImageStorage, Location, RbdAccess, RbdStorage, create_rbd_image, remove_rbd_image,
    rename_rbd_image,
};
use futures_util::future::LocalBoxFuture;
use rustix::fs::{Access, AtFlags, CWD, StatxFlags, accessat, statx};

use crate::allowed_paths::note_data_file;
use crate::durable_rename::{IfExists, rename_durable, sync_folder};
use crate::lock::lock_for_writing;

/// Suffix of the file of an unfinished image.
const PART: &str = ".part";
/// Maximum length of a file name, in bytes.
const MAX_NAME: usize = 255;

/// `ENOENT` of Linux: there is no image of this name.
const ENOENT: i32 = 2;

/// Makes a new image of `size` bytes, all holes, durably. Needs the event loop of the current
/// thread. On a block device, a raw image is the device itself, and keeps its content; other
/// formats overwrite the old content.
///
/// # Errors
/// The error names the image: the size is not a multiple of 512, the name exists, the host or
/// cluster refuses, or a device is too small or in use. An unfinished image is removed.
pub fn create(name: &Path, size: u64, format: ImageFormat) -> LocalBoxFuture<'_, Result<()>> {
    rare(async move { create_as(name, size, format, NewFile::default()).await })
}

/// As [`create`], with hints for the file system, or as the new content of an existing file.
///
/// # Errors
/// As [`create`]; `Locked` if another program uses the existing file.
pub fn create_as(
    name: &Path,
    size: u64,
    format: ImageFormat,
    how: NewFile,
) -> LocalBoxFuture<'_, Result<()>> {
    rare(async move {
        if !size.is_multiple_of(512) {
            let what = format!("a disk of {size} bytes is no multiple of 512");
            return Err(Error::new(ErrorKind::InvalidInput, what).on(&name.display().to_string()));
        }
        let storage = create_storage(name, initial_file_size(format, size), how).await?;
        let is_device = is_device(name);
        let finished = async {
            if !is_device || format != ImageFormat::Raw {
                blockhouse_format::create(&storage, format, size).await?;
            }
            if let (Location::File(path), false) = (Location::of(name)?, is_device) {
                sync_folder(&path)?;
            }
            storage.close().await
        };
        let finished = finished.await;
        // An image in Ceph that is open cannot be removed.
        drop(storage);
        // A file that existed before is not removed.
        if finished.is_err() && !how.is_in_place {
            remove_created(name).await;
        }
        finished
    })
}

/// As [`create_as`], for a qcow2 image with these properties, without access to its backing file. A
/// data file must exist and have an absolute name; if it is the raw disk, it keeps its content.
///
/// # Errors
/// As there; `InvalidInput` for options that contradict each other.
pub fn create_qcow2<'a>(
    name: &'a Path,
    options: &'a CreateOptions,
    how: NewFile,
) -> LocalBoxFuture<'a, Result<()>> {
    rare(async move {
        // Until the header is written the file is empty, so no program takes it for an image.
        create_as(name, 0, ImageFormat::Raw, how).await?;
        let filled = async {
            let storage = open_created(name).await?;
            let data = match &options.data_file {
                Some(file) => {
                    note_data_file(name, &file.name);
                    let data = lock_for_writing(Path::new(OsStr::from_bytes(&file.name)))?;
                    Some(ImageStorage::from(data))
                }
                None => None,
            };
            let progress = ToolProgress::default();
            qcow2::create_with(&storage, data.as_ref(), options, &progress).await?;
            storage.flush(SyncMode::Full).await?;
            if let Some(data) = data {
                data.close().await?;
            }
            storage.close().await
        };
        let filled = filled.await;
        // A file that existed before is not removed.
        if filled.is_err() && !how.is_in_place {
            remove_created(name).await;
        }
        filled
    })
}

/// Creates the storage of an image, open for writing.
async fn create_storage(name: &Path, size: u64, how: NewFile) -> Result<ImageStorage> {
    match Location::of(name)? {
        Location::File(path) if is_device(&path) => Ok(open_device(&path, size)?.into()),
        Location::File(path) => {
            check_new_name(&path)?;
            if how.is_in_place {
                // Refuses a file that another program uses, because the program would lose its
                // data.
                drop(lock_for_writing(&path)?);
            }
            Ok(HostFile::create_as(&path, size, PageCache::Used, how)?.into())
        }
        Location::Nbd { .. } => {
            let what = "an export of another server cannot be made from here";
            let error = Error::new(ErrorKind::Unsupported, what).on(&name.to_string_lossy());
            Err(error.hint("make the image where its server is"))
        }
        Location::Null(null) => {
            let what = format!("{} keeps nothing, so no image is made there", null.driver());
            Err(Error::new(ErrorKind::Unsupported, what).on(&name.to_string_lossy()))
        }
        Location::Rbd(location) => {
            create_rbd_image(&location, size).await?;
            open_created(name).await
        }
    }
}

/// Opens and locks a device for a new image that needs `size` bytes or more.
fn open_device(path: &Path, size: u64) -> Result<HostFile> {
    let device = lock_for_writing(path)?;
    let has = device.size();
    if has >= size {
        return Ok(device);
    }
    let what = format!("is a device of {has} bytes, and {size} are needed");
    Err(Error::new(ErrorKind::NoSpace, what).on(device.name()).hint("use a larger one"))
}

/// Whether a name leads to a block device of this host.
pub fn is_device(name: &Path) -> bool {
    match Location::of(name) {
        Ok(Location::File(path)) => {
            path.metadata().is_ok_and(|found| found.file_type().is_block_device())
        }
        _ => false,
    }
}

/// Opens an image from [`create`] to fill it, through the page cache. No other program uses it yet;
/// a device is locked.
///
/// # Errors
/// The error names the image.
pub fn open_created(name: &Path) -> LocalBoxFuture<'_, Result<ImageStorage>> {
    rare(async move {
        match Location::of(name)? {
            Location::Rbd(location) => {
                let rbd = RbdStorage::open(location, RbdAccess::Write).await?;
                Ok(ImageStorage::Rbd(Box::new(rbd)))
            }
            Location::File(path) if is_device(&path) => Ok(lock_for_writing(&path)?.into()),
            Location::File(_) | Location::Nbd { .. } | Location::Null(_) => {
                Ok(HostFile::open(name, OpenMode::ReadWrite, PageCache::Used)?.into())
            }
        }
    })
}

/// Removes an unfinished image of [`create`], which must not be open; a device stays. Errors are
/// ignored: the caller reports the error that stopped the work.
pub async fn remove_created(name: &Path) {
    match Location::of(name) {
        Ok(Location::Rbd(location)) => drop(remove_rbd_image(&location).await),
        Ok(Location::File(path)) if !is_device(&path) => drop(std::fs::remove_file(path)),
        Ok(Location::File(_) | Location::Nbd { .. } | Location::Null(_)) | Err(_) => {}
    }
}

/// Gives a finished image another name in the same folder, or in the same pool of Ceph. The image
/// must be durable and not open. The new name is durable when this returns.
///
/// # Errors
/// As [`rename_durable`]; the error names the image. An image in Ceph is never replaced.
pub fn rename_finished<'a>(
    from: &'a Path,
    to: &'a Path,
    if_exists: IfExists,
) -> LocalBoxFuture<'a, Result<()>> {
    rare(async move {
        match (Location::of(from)?, Location::of(to)?) {
            (Location::Rbd(old), Location::Rbd(new)) => {
                let renamed = rename_rbd_image(&old, &new).await;
                renamed.map_err(|error| error.hint(format!("the image is complete: {old}")))
            }
            _ => rename_durable(from, to, if_exists),
        }
    })
}

/// Whether there is an image of this name.
///
/// # Errors
/// `Unsupported` for an export of another server; errors of the cluster; an invalid name.
pub async fn exists(name: &Path) -> Result<bool> {
    match Location::of(name)? {
        Location::File(path) => Ok(std::fs::symlink_metadata(path).is_ok()),
        Location::Null(_) => Ok(true),
        Location::Nbd { .. } => {
            let what = "cannot determine whether the export exists";
            Err(Error::new(ErrorKind::Unsupported, what).on(&name.to_string_lossy()))
        }
        Location::Rbd(location) => match RbdStorage::open(location, RbdAccess::ReadShared).await {
            Ok(image) => image.close().await.map(|()| true),
            // ENOENT may also mean that the pool is missing; then the creation of the image fails.
            Err(error) if error.errno() == ENOENT => Ok(false),
            Err(error) => Err(error),
        },
    }
}

/// Path of the unfinished copy that becomes the image `target`.
pub fn part_of(target: &Path) -> PathBuf {
    if let Ok(Location::Rbd(location)) = Location::of(target) {
        return location.with_image(&format!("{}.part", location.image())).to_string().into();
    }
    let name = target.file_name().unwrap_or_default();
    let kept = MAX_NAME - PART.len();
    if name.len() <= kept {
        let mut path = target.as_os_str().to_owned();
        path.push(PART);
        return path.into();
    }
    // The length of a file name is limited. A long name is cut, and the hash of the whole name is
    // appended.
    let number = format!("~{:016x}", fnv(name.as_bytes()));
    let mut start = kept - number.len();
    let text = name.to_string_lossy();
    while !text.is_char_boundary(start) {
        start -= 1;
    }
    target.with_file_name(format!("{}{number}{PART}", &text[..start]))
}

/// The file that a new image with this name becomes: the target of its symbolic links, even if no
/// file is there.
pub fn behind_links(name: &Path) -> PathBuf {
    const MAX_LINKS: usize = 40;
    let mut path = name.to_owned();
    if !matches!(Location::of(name), Ok(Location::File(_))) {
        return path;
    }
    for _ in 0..MAX_LINKS {
        let Ok(next) = std::fs::read_link(&path) else { return path };
        path = path.parent().unwrap_or(Path::new("")).join(next);
    }
    name.to_owned()
}

/// Whether a file cannot be replaced by a rename, only written to: it is a mount point, or its
/// folder is not writable.
pub fn keeps_its_place(file: &Path) -> bool {
    let folder = file.parent().filter(|parent| !parent.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    let (may_write, at_effective) = (Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS);
    accessat(CWD, folder, may_write, at_effective).is_err() || is_mounted(file, folder)
}

fn is_mounted(file: &Path, folder: &Path) -> bool {
    let found = |path| statx(CWD, path, AtFlags::empty(), StatxFlags::MNT_ID);
    match (found(file), found(folder)) {
        // Before Linux 5.8 both are 0.
        (Ok(file), Ok(folder)) => file.stx_mnt_id != folder.stx_mnt_id,
        _ => false,
    }
}

/// As [`format_by_name`](crate::format_by_name), for a new image.
///
/// # Errors
/// As [`ImageFormat::for_new`].
pub fn format_for_new(name: &Path) -> Result<ImageFormat, String> {
    match Location::of(name) {
        Ok(Location::Rbd(location)) => ImageFormat::for_new(Path::new(location.image())),
        Ok(Location::Nbd { .. } | Location::Null(_)) => Ok(ImageFormat::Raw),
        Ok(Location::File(_)) | Err(_) => ImageFormat::for_new(name),
    }
}

/// Refuses a new file in `/dev`: the name is probably a mistyped device, and the file would be in
/// memory only and lost at a restart. File systems mounted below (`/dev/shm`) are not affected.
///
/// # Errors
/// `InvalidInput`.
pub fn check_new_name(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let devices = Path::new("/dev");
    let is_among_devices = || {
        let folder = folder.unwrap_or(Path::new(".")).canonicalize().ok()?;
        let is_one_file_system = folder.metadata().ok()?.dev() == devices.metadata().ok()?.dev();
        Some(folder.starts_with(devices) && is_one_file_system)
    };
    if !is_among_devices().unwrap_or(false) {
        return Ok(());
    }
    let what = "there is no such device, and a new file among the devices would be lost";
    Err(Error::new(ErrorKind::InvalidInput, what)
        .on(&path.display().to_string())
        .hint("check the name of the device, or choose a path outside /dev"))
}
