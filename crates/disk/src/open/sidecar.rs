//! The sidecar of a raw image: `IMAGE.bitmaps` beside it, which has its persistent bitmaps.
//!
//! A raw image has no room for them. Its sidecar is a qcow2 image without data, whose data file is the raw image. A raw image that
//! has one is opened through it, so all that holds for the bitmaps of qcow2 images holds for those of raw ones.
//!
//! Guarantee: a sidecar is used for the file that it was made for alone, and only if nothing has changed that without
//! it. It *belongs* to an image where
//!
//! - the image is the file that the sidecar was made for, by inode and birth, with the size that it
//!   had, or the one that a process which died was giving it, or had given it before
//!   (`DataFileMark::other_size`);
//! - none of its bitmaps is enabled, or the image has the time of change (`ctime`, which no program can set) that the sidecar
//!   noted when it was closed;
//! - or the sidecar was not closed, because its server died: then the image was not changed after the last write that this
//!   server noted in its state file; or the host has died with it, and what the server vouched for tells (`vouching`);
//! - the sidecar is owned by the image's owner, by this user or by root, and its file system has this host's clock.
//!
//! What is in doubt does not belong. Then the image is opened without bitmaps, and a warning says why. The time is looked at before
//! the image is locked, and once more after, before anything tells later processes that the sidecar belongs ([`Route::confirm`]).
//! The sidecar that was found is the one that is opened, whatever its path leads to by then. So is the image: the name of it in
//! the sidecar was compared with the one that the user gave, and leads to no other file.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockhouse_core::{Error, ErrorKind, Result, Storage};
use blockhouse_engine::{HostFile, OpenMode, PageCache};
use blockhouse_format::ImageFormat;
use blockhouse_format::qcow2::Sidecar;
use blockhouse_storage::{ImageStorage, Location};
use rustix::fs::{Mode, OFlags};

use super::create::format_by_name;
use super::handed_over::Files;
use super::image_disk::ImageDisk;
use super::image_options::{ImageOptions, Locking};
use super::lock::is_being_written;
use super::open_location::{Identity, identity_of as file_identity, open_location};
use super::restore::{Clock, change_time, clock_of, find_state, identity_of, status_of};
use super::vouching::is_vouched_for;
use crate::options::Access;
use crate::state::StateDir;

/// How much later than its stamp in the state file a write of a server may change the file: it is stamped before it is begun and
/// after it has completed, and a server may be killed in between. What another program changes within this time after a kill
/// is not noticed.
const MAX_DELAY: Duration = Duration::from_millis(100);

/// The path of an image's sidecar.
pub(super) fn sidecar_of(image: &Path) -> PathBuf {
    let mut name = image.as_os_str().to_owned();
    name.push(".bitmaps");
    name.into()
}

/// Whether an image is opened through a sidecar.
pub(super) enum Found {
    /// It is not raw, no file, or has none.
    Nothing,
    /// Through this one, which is `file`. The image itself is `image`, and was changed for the last time at `seen`.
    Belongs { sidecar: PathBuf, file: OwnedFd, image: OwnedFd, seen: Duration },
    /// It has one that is not used: why.
    Strange(Error),
}

/// The sidecar of an image that is to be opened.
///
/// # Errors
/// The host's.
pub(super) async fn find(image: &Path, options: &ImageOptions) -> Result<Found> {
    let Location::File(image) = Location::of(image)? else { return Ok(Found::Nothing) };
    let format = options.format.unwrap_or_else(|| format_by_name(&image));
    if format != ImageFormat::Raw {
        return Ok(Found::Nothing);
    }
    if let Some(why) = behind_link(&image) {
        return Ok(Found::Strange(why));
    }
    let path = sidecar_of(&image);
    if !is_file(&image) || !is_file(&path) {
        return Ok(Found::Nothing);
    }
    let (raw, disk) = open_found(&image)?;
    let (found, file) = match open_found(&path) {
        Ok(opened) => opened,
        Err(error) if options.access == Access::ReadOnly => {
            return Ok(Found::Strange(unused(&error.to_string())));
        }
        Err(error) => {
            let hint =
                "changes of the image are recorded there: give it the image's owner and mode";
            return Err(error.hint(hint));
        }
    };
    let seen = change_time(&status_of(&disk)?);
    Ok(match check(&image, (&disk, seen), &file, options).await? {
        None => Found::Belongs { sidecar: path, file: found, image: raw, seen },
        Some(why) => Found::Strange(
            unused(&format!("{}: {why}", path.display()))
                .hint("remove that file, add a bitmap, and make a full backup"),
        ),
    })
}

/// Opens an image or its sidecar, which no symbolic link leads to: to be opened again, and for reading.
pub(super) fn open_found(path: &Path) -> Result<(OwnedFd, HostFile)> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let found = rustix::fs::open(path, flags, Mode::empty());
    let found = found.map_err(|error| {
        Error::host("cannot open", error.into()).on(&path.display().to_string())
    })?;
    let file = HostFile::open_found(found.as_fd(), path, OpenMode::ReadOnly, PageCache::Used)?;
    Ok((found, file))
}

/// Whether a path is that of a regular file itself, which a symbolic link is not.
pub(super) fn is_file(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|found| found.is_file())
}

/// Why no sidecar is used, if the path leads by a symbolic link to an image that has one: of two names, each could have its own.
fn behind_link(image: &Path) -> Option<Error> {
    if !std::fs::symlink_metadata(image).ok()?.is_symlink() {
        return None;
    }
    let target = std::fs::canonicalize(image).ok()?;
    let sidecar = sidecar_of(&target);
    is_file(&sidecar).then(|| {
        let (sidecar, image) = (sidecar.display(), image.display());
        unused(&format!("{sidecar}: {image} is a symbolic link to its image"))
            .hint(format!("name the image itself: {}", target.display()))
    })
}

/// By which file an image is opened, and how: its own, or its sidecar.
pub(super) struct Route<'a> {
    pub(super) path: Cow<'a, Path>,
    pub(super) options: Cow<'a, ImageOptions>,
    through: Through,
}

enum Through {
    /// The image's own file.
    Itself,
    /// A sidecar that was found to belong to an image with this time of change.
    Sidecar { file: OwnedFd, image: OwnedFd, seen: Duration },
    /// One that another process has found to belong, and has open.
    HandedOver,
}

/// # Errors
/// The host's.
pub(super) async fn route<'a>(
    files: &Files,
    image: &'a Path,
    options: &'a ImageOptions,
) -> Result<Route<'a>> {
    let (sidecar, through) = match files {
        Files::Host => match find(image, options).await? {
            Found::Belongs { sidecar, file, image, seen } => {
                (Some(sidecar), Through::Sidecar { file, image, seen })
            }
            Found::Strange(why) => {
                tracing::warn!("{why}");
                (None, Through::Itself)
            }
            Found::Nothing => (None, Through::Itself),
        },
        Files::HandedOver(_) => {
            let path = sidecar_of(image);
            match files.is_next(&path) {
                true => (Some(path), Through::HandedOver),
                false => (None, Through::Itself),
            }
        }
    };
    Ok(match sidecar {
        Some(path) => {
            let options = ImageOptions { format: Some(ImageFormat::Qcow2), ..options.clone() };
            Route { path: path.into(), options: Cow::Owned(options), through }
        }
        None => Route { path: image.into(), options: Cow::Borrowed(options), through },
    })
}

impl<'a> Route<'a> {
    /// By an image's own file, whatever is beside it.
    pub(super) fn itself(path: &'a Path, options: &'a ImageOptions) -> Self {
        Self { path: path.into(), options: Cow::Borrowed(options), through: Through::Itself }
    }

    /// Opens the file.
    ///
    /// # Errors
    /// As [`open_location`].
    pub(super) async fn open(&self, files: &mut Files) -> Result<(ImageStorage, Option<Identity>)> {
        let Through::Sidecar { file, .. } = &self.through else {
            return open_location(files, &self.path, &self.options).await;
        };
        let (mode, cache) = (self.options.open_mode(), self.options.cache.page_cache());
        let file = HostFile::open_found(file.as_fd(), &self.path, mode, cache)?;
        let identity = file_identity(&file)?;
        Ok((file.into(), Some(identity)))
    }

    /// The raw image that the user named, where a sidecar was found to belong to it. `disk` is what was opened, without a data
    /// file.
    ///
    /// # Errors
    /// `InvalidInput` where a sidecar is opened for writing by its own name: nothing has found out whether it belongs to its
    /// image. The host's.
    pub(super) fn raw_image(&self, disk: &ImageDisk) -> Result<Option<OwnedFd>> {
        match &self.through {
            Through::Sidecar { image, .. } => image.try_clone().map(Some).map_err(|error| {
                Error::host("cannot open the image that it belongs to", error).on(disk.name())
            }),
            Through::Itself
                if self.options.access == Access::ReadWrite
                    && disk.format().sidecar_mark().is_some() =>
            {
                let what =
                    "holds the bitmaps of a raw image, and is changed together with it alone";
                Err(Error::new(ErrorKind::InvalidInput, what)
                    .on(disk.name())
                    .hint("name the raw image instead: the same path without '.bitmaps'"))
            }
            Through::Itself | Through::HandedOver => Ok(None),
        }
    }

    /// Whether what was found still holds, now that the disk is open and locked, and nothing is changed yet.
    ///
    /// # Errors
    /// `InvalidInput` where another program has changed or replaced the image meanwhile. The host's.
    pub(super) fn confirm(&self, disk: &ImageDisk) -> Result<()> {
        let refuse = |what: &str| {
            let error = Error::new(ErrorKind::InvalidInput, what.to_owned());
            Err(error.on(disk.name()).hint("try again"))
        };
        match (&self.through, disk.format().sidecar_mark()) {
            (Through::Itself | Through::HandedOver, _) => Ok(()),
            (Through::Sidecar { seen, .. }, Some(mark)) => {
                let file = disk.format().data().storage().as_file();
                let is_it = match file.filter(|_| disk.format().is_fully_allocated()) {
                    Some(file) => {
                        let is_unchanged = self.options.locking == Locking::None
                            || change_time(&status_of(file)?) == *seen;
                        is_unchanged && identity(file)? == mark.identity
                    }
                    None => false,
                };
                if is_it {
                    return Ok(());
                }
                refuse("another program has changed the image while it was opened")
            }
            (Through::Sidecar { .. }, None) => {
                refuse("another program has changed the file while it was opened")
            }
        }
    }
}

/// Why a sidecar does not belong to an image, which was changed for the last time at `changed`.
async fn check(
    image: &Path,
    (disk, changed): (&HostFile, Duration),
    file: &HostFile,
    options: &ImageOptions,
) -> Result<Option<String>> {
    let sidecar = match Sidecar::read(file).await {
        Ok(Some(sidecar)) => sidecar,
        Ok(None) => return Ok(Some("is no image with the bitmaps of a raw one".into())),
        Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported) => {
            return Ok(Some(format!("cannot be used: {error}")));
        }
        Err(error) => return Err(error),
    };
    let owner = status_of(file)?.st_uid;
    let owners = [status_of(disk)?.st_uid, rustix::process::geteuid().as_raw(), 0];
    if !owners.contains(&owner) {
        return Ok(Some("is owned by another user than the image".into()));
    }
    let name = image.file_name().map(OsStr::as_bytes);
    if name != Some(&sidecar.name) || identity(disk)? != sidecar.identity {
        return Ok(Some("belongs to another file, or to one that was replaced".into()));
    }
    if disk.size() != sidecar.size && Some(disk.size()) != sidecar.other_size {
        let (size, wanted) = (disk.size(), sidecar.size);
        return Ok(Some(format!("is of a disk of {wanted} bytes, and the image has {size}")));
    }
    // A server that has the image open changes it, and records that.
    let is_shared = options.locking == Locking::None && is_being_written(file);
    let is_told = clock_of(disk)? == Clock::ThisHost;
    let is_unchanged = match (sidecar.has_enabled, sidecar.is_live) {
        (false, _) => true,
        (true, false) => is_told && changed == sidecar.changed,
        (true, true) => {
            let is_left = || is_as_left(changed, file, options.state.directory());
            is_shared || is_told && (is_left()? || is_vouched_for(changed, sidecar.voucher))
        }
    };
    Ok((!is_unchanged).then(|| {
        "may lack changes: the image was changed without it, or nothing tells that it was not"
            .into()
    }))
}

/// Whether an image is as the server left it that died while it recorded changes, as far as its state file tells.
fn is_as_left(changed: Duration, file: &HostFile, dir: Option<&StateDir>) -> Result<bool> {
    Ok(find_state(file, dir)?.is_some_and(|state| {
        let last_write = Duration::from_nanos(state.page().last_data_write());
        changed <= last_write + MAX_DELAY
    }))
}

/// Which file an image is, for its sidecar. Numbers of devices may be others after a restart of the host.
///
/// # Errors
/// The host's.
pub(super) fn identity(file: &HostFile) -> Result<[u8; 16]> {
    let identity = identity_of(file)?;
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&identity.inode.to_be_bytes());
    bytes[8..].copy_from_slice(&identity.birth.to_be_bytes());
    Ok(bytes)
}

fn unused(why: &str) -> Error {
    Error::new(ErrorKind::InvalidInput, format!("{why}; its bitmaps are not used"))
}
