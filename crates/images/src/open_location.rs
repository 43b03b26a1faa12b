//! Opens the storage, of any kind, that an image's name refers to.

use std::path::{Path, PathBuf};

use blockhouse_core::{ByteRange, Error, ErrorKind, Result, Storage, rare};
use blockhouse_disk::Access;
use blockhouse_engine::{HostFile, OpenMode, PageCache};
use blockhouse_storage::{
    Concat, ImageStorage, Location, NbdStorage, NullStorage, RbdAccess, RbdStorage,
};

use crate::handed_over::Files;
use crate::image_options::{ImageOptions, Locking};
use crate::lock::lock;
use crate::qemu_name::is_address;
use crate::restore::status_of;

/// Device and inode: the identity of a file under any name.
pub(crate) type Identity = (u64, u64);

/// Opens a file; returns its identity as well.
///
/// # Errors
/// As [`HostFile::open`]; `Unsupported` if the name leads to another server.
pub(crate) fn open_file(
    files: &mut Files,
    path: &Path,
    options: &ImageOptions,
) -> Result<(HostFile, Identity)> {
    let Location::File(path) = Location::of(path)? else {
        let what = "work on the file itself cannot be done on what another server has";
        let error = Error::new(ErrorKind::Unsupported, what).on(&path.to_string_lossy());
        return Err(error.hint("do it where the file is"));
    };
    let file = files.open(&path, options)?;
    let identity = identity_of(&file)?;
    Ok((file, identity))
}

/// Opens the storage that a name refers to. The name is from the user, or from an image that the
/// user allows to name it.
///
/// # Errors
/// As [`HostFile::open`], [`NbdStorage::connect`] and [`RbdStorage::open`]; `ReadOnly` if a server
/// refuses writes.
pub(crate) async fn open_location(
    files: &mut Files,
    name: &Path,
    options: &ImageOptions,
) -> Result<(ImageStorage, Option<Identity>)> {
    let location = Location::of(name)?;
    files.check_local(&location, name)?;
    match location {
        Location::File(_) => {
            let options = &options.clone().in_part(options.part);
            part_of_file(open_file(files, name, options)?.0, options)
        }
        _ if options.part.is_some() => {
            let what = "a part is only read of a file, not of what another server has";
            Err(Error::new(ErrorKind::Unsupported, what).on(&name.to_string_lossy()))
        }
        Location::Nbd { uri, reconnect } => {
            let nbd = NbdStorage::connect(uri, reconnect).await?;
            if options.access == Access::ReadWrite && nbd.is_read_only() {
                let error = Error::new(ErrorKind::ReadOnly, "the server refuses writes");
                return Err(error.on(nbd.name()).hint("open it with --read-only"));
            }
            Ok((ImageStorage::Nbd(Box::new(nbd)), None))
        }
        Location::Rbd(location) => {
            let access = match (options.access, options.locking) {
                (Access::ReadWrite, _) => RbdAccess::Write,
                (Access::ReadOnly, Locking::Held) => RbdAccess::Read,
                (Access::ReadOnly, Locking::None | Locking::Inactive) => RbdAccess::ReadShared,
            };
            let rbd = rare(RbdStorage::open(location, access)).await?;
            Ok((ImageStorage::Rbd(Box::new(rbd)), None))
        }
        Location::Null(location) => Ok((ImageStorage::Null(NullStorage::new(location)), None)),
    }
}

/// The storage of a file, or of the part of it in the options. For a part, the whole file is
/// locked. Returns the identity only for a whole file, because two images that are read may be
/// parts of one file.
///
/// # Errors
/// `InvalidInput` if the part ends after the file; host errors; `Locked`.
pub(crate) fn part_of_file(
    file: HostFile,
    options: &ImageOptions,
) -> Result<(ImageStorage, Option<Identity>)> {
    let Some(part) = options.part else {
        let identity = identity_of(&file)?;
        return Ok((file.into(), Some(identity)));
    };
    let refuse = |what: String| Err(Error::new(ErrorKind::InvalidInput, what).on(file.name()));
    if options.locking == Locking::Held {
        lock(&file, options.access)?;
    }
    let left = file.size().checked_sub(part.offset);
    match (left, part.size) {
        (Some(left), size) if size.is_none_or(|size| size <= left) => {
            let range = ByteRange::between(part.offset, part.offset + size.unwrap_or(left));
            Ok((ImageStorage::Concat(Box::new(Concat::part(file, range))), None))
        }
        _ => refuse(format!("has {} bytes, and the part ends after them", file.size())),
    }
}

/// The canonical path of an existing file.
pub(crate) fn canonical(name: &str) -> Result<PathBuf> {
    Path::new(name).canonicalize().map_err(|error| Error::host("cannot find", error).on(name))
}

pub(crate) fn identity_of(file: &HostFile) -> Result<Identity> {
    let status = status_of(file)?;
    Ok((status.st_dev, status.st_ino))
}

/// Refuses `found`, the file that is at the path of the image `name` now, if it is not the image's
/// file.
///
/// # Errors
/// `InvalidInput`; the host's.
pub(crate) fn check_same_file(file: &HostFile, found: &HostFile, name: &str) -> Result<()> {
    if identity_of(found)? == identity_of(file)? {
        return Ok(());
    }
    let what = "is another file than the one that is in use, which had its path";
    let error = Error::new(ErrorKind::InvalidInput, what).on(name);
    Err(error.hint("give the image its name back"))
}

/// The canonical path of an open file, which is at the path `name`.
///
/// # Errors
/// As [`check_same_file`]; the host's.
pub(crate) fn path_in_use(file: &HostFile, name: &str) -> Result<PathBuf> {
    let path = canonical(name)?;
    let found = HostFile::open(&path, OpenMode::ReadOnly, PageCache::Used)?;
    check_same_file(file, &found, name)?;
    Ok(path)
}

/// Whether a name is an [address](is_address) that cannot be opened here.
pub fn is_foreign_address(name: &[u8]) -> bool {
    is_address(name) && !Location::is_remote(name)
}
