//! New images: files of this host, and images in Ceph.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use blockhouse_core::{Error, ErrorKind, Result, Storage};
use blockhouse_engine::{HostFile, OpenMode, PageCache};
use blockhouse_format::{ImageFormat, initial_file_size};
use blockhouse_storage::{
    ImageStorage, Location, RbdAccess, RbdStorage, create_rbd_image, remove_rbd_image,
    rename_rbd_image,
};

use super::durable_rename::{IfExists, rename_durable, sync_folder};

/// `ENOENT` of Linux: there is no image of this name.
const ENOENT: i32 = 2;

/// Makes a new image of `size` bytes, all holes, durably. Needs the loop of the current thread.
///
/// # Errors
/// One that names the image: the size is no multiple of 512, there is one of this name, or the host or cluster refuses.
/// An image that could not be finished is removed.
pub async fn create(name: &Path, size: u64, format: ImageFormat) -> Result<()> {
    if !size.is_multiple_of(512) {
        let what = format!("a disk of {size} bytes is no multiple of 512");
        return Err(Error::new(ErrorKind::InvalidInput, what).on(&name.display().to_string()));
    }
    let storage = create_storage(name, initial_file_size(format, size)).await?;
    let finished = async {
        blockhouse_format::create(&storage, format, size).await?;
        if let Location::File(path) = Location::of(name)? {
            sync_folder(&path)?;
        }
        storage.close().await
    };
    let finished = finished.await;
    // An image in Ceph that is open cannot be removed.
    drop(storage);
    if finished.is_err() {
        remove_created(name).await;
    }
    finished
}

/// Makes what an image is stored in, open for writing.
async fn create_storage(name: &Path, size: u64) -> Result<ImageStorage> {
    match Location::of(name)? {
        Location::File(path) => {
            check_new_name(&path)?;
            Ok(HostFile::create(&path, size, PageCache::Used)?.into())
        }
        Location::Nbd { .. } => {
            let what = "an export of another server cannot be made from here";
            let error = Error::new(ErrorKind::Unsupported, what).on(&name.to_string_lossy());
            Err(error.hint("make the image where its server is"))
        }
        Location::Rbd(location) => {
            create_rbd_image(&location, size).await?;
            open_created(name).await
        }
    }
}

/// Opens what [`create`] has made for further work on it, through the page cache. No other program uses it yet.
///
/// # Errors
/// One that names the image.
pub async fn open_created(name: &Path) -> Result<ImageStorage> {
    match Location::of(name)? {
        Location::Rbd(location) => {
            let rbd = RbdStorage::open(location, RbdAccess::Write).await?;
            Ok(ImageStorage::Rbd(Box::new(rbd)))
        }
        Location::File(_) | Location::Nbd { .. } => {
            Ok(HostFile::open(name, OpenMode::ReadWrite, PageCache::Used)?.into())
        }
    }
}

/// Removes what [`create`] has made and could not be finished. It must not be open. The error that counts is the one
/// before, so there is none.
pub async fn remove_created(name: &Path) {
    match Location::of(name) {
        Ok(Location::Rbd(location)) => drop(remove_rbd_image(&location).await),
        Ok(Location::File(path)) => drop(std::fs::remove_file(path)),
        Ok(Location::Nbd { .. }) | Err(_) => {}
    }
}

/// Gives a finished image, which is durable and not open, another name: in the same folder, or the same pool of Ceph.
/// Durable when it returns.
///
/// # Errors
/// One that names the image: as [`rename_durable`]. An image in Ceph is never replaced.
pub async fn rename_finished(from: &Path, to: &Path, if_exists: IfExists) -> Result<()> {
    match (Location::of(from)?, Location::of(to)?) {
        (Location::Rbd(old), Location::Rbd(new)) => {
            let renamed = rename_rbd_image(&old, &new).await;
            renamed.map_err(|error| error.hint(format!("the image is complete: {old}")))
        }
        _ => rename_durable(from, to, if_exists),
    }
}

/// Whether there is an image of this name.
///
/// # Errors
/// It cannot be found out, or not without opening it.
pub async fn exists(name: &Path) -> Result<bool> {
    match Location::of(name)? {
        Location::File(path) => Ok(std::fs::symlink_metadata(path).is_ok()),
        Location::Nbd { .. } => {
            let what = "cannot find out whether there is such an export";
            Err(Error::new(ErrorKind::Unsupported, what).on(&name.to_string_lossy()))
        }
        Location::Rbd(location) => match RbdStorage::open(location, RbdAccess::ReadShared).await {
            Ok(image) => image.close().await.map(|()| true),
            // Or there is no such pool: then what follows fails for that.
            Err(error) if error.errno() == ENOENT => Ok(false),
            Err(error) => Err(error),
        },
    }
}

/// Where a copy of what becomes the image `target` is kept until it is complete.
pub fn part_of(target: &Path) -> PathBuf {
    if let Ok(Location::Rbd(location)) = Location::of(target) {
        return location.with_image(&format!("{}.part", location.image())).to_string().into();
    }
    let mut name = target.as_os_str().to_owned();
    name.push(".part");
    name.into()
}

/// The format that the name of an image stands for: `.qcow2`, otherwise raw. The name of an image in Ceph ends before
/// its snapshot and its parameters. An export of another server is a disk, whatever it is called.
pub fn format_by_name(name: &Path) -> ImageFormat {
    match Location::of(name) {
        Ok(Location::Rbd(location)) => ImageFormat::by_name(Path::new(location.image())),
        Ok(Location::Nbd { .. }) => ImageFormat::Raw,
        Ok(Location::File(_)) | Err(_) => ImageFormat::by_name(name),
    }
}

/// As [`format_by_name`], of a new image.
///
/// # Errors
/// As [`ImageFormat::for_new`].
pub fn format_for_new(name: &Path) -> Result<ImageFormat, String> {
    match Location::of(name) {
        Ok(Location::Rbd(location)) => ImageFormat::for_new(Path::new(location.image())),
        Ok(Location::Nbd { .. }) => Ok(ImageFormat::Raw),
        Ok(Location::File(_)) | Err(_) => ImageFormat::for_new(name),
    }
}

/// Refuses the name of a new file in the folder of devices: it is a mistyped device, mostly, and the file
/// would take memory and be gone after a restart. File systems mounted below (`/dev/shm`) are none.
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
