//! The side file of a raw image, which has the image's persistent bitmaps. It is `IMAGE.bitmaps`
//! beside the image, or at the user's path (`ImageOptions::side_file`).
//!
//! A raw image cannot store bitmaps. Its side file is a qcow2 image without data, whose data file
//! is the raw image. A raw image is opened through its side file, so its bitmaps work as those of
//! qcow2 images. The raw image is a *volume* (`volume`): a file, or, if the user names the side
//! file, also a block device, an image in Ceph or an export of another server.
//!
//! Guarantee: a side file is used only for the volume that it was made for, and only if no program
//! has changed the volume without it. It *belongs* to a volume if all of these are true:
//!
//! - The volume is the one that the side file was made for, and has the recorded size, or the size
//!   before or after a resize in which a process died (`DataFileMark::other_size`).
//! - The side file is owned by the image's owner, by this user or by root.
//! - None of the side file's bitmaps is enabled, or one of these is true:
//!   - The side file was closed, and the volume is unchanged since. The evidence is the volume's
//!     time of change (`ctime`, which no program can set) if its file system has this host's clock,
//!     or the kernel's count of bytes written to a device.
//!   - The side file was not closed, because its server died. The volume was not changed after the
//!     last write in that server's state file, and a device got no more bytes than that server has
//!     sent. If the host crashed too, the server's voucher decides (`vouching`).
//!   - A running server has the image open and records its changes, and this opening takes no lock.
//!   - The host cannot tell whether the volume has changed, and the user states that there is no
//!     other writer.
//!
//! A side file does not belong if one of these is in doubt. Then the image is opened without
//! bitmaps, and a warning says why. The volume is checked before the image is locked, and again
//! afterwards ([`Route::confirm`]), before any write tells later processes that the side file
//! belongs. The checked side file is opened, even if its path leads to another file by then. The
//! same holds for the image: if its name in the side file does not lead to the user's file, the
//! user's file is opened.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use blockhouse_core::{Error, ErrorKind, Result, Storage};
use blockhouse_disk::{Access, StateDir, StoredImage};
use blockhouse_engine::{HostFile, OpenMode, PageCache};
use blockhouse_format::ImageFormat;
use blockhouse_format::qcow2::SideFileHeader;
use blockhouse_storage::{ImageStorage, Location};
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};

use crate::handed_over::Files;
use crate::image_options::{ImageOptions, Locking, SIDE_FILE_SUFFIX, side_file_of};
use crate::lock::is_being_written;
use crate::open_location::{Identity, identity_of as file_identity, open_location};
use crate::probe_check::format_by_name;
use crate::restore::{find_state, status_of};
use crate::volume::{Seen, Told, Volume, told_by_close, told_by_count};
use crate::vouching::is_vouched_for;

/// Maximum time from the stamp of a write in the state file to the change of the file by that
/// write. A write is stamped before it begins and after it has completed, and a server may be
/// killed in between. Changes by another program within this time after a kill are not detected.
const MAX_DELAY: Duration = Duration::from_millis(100);

/// The path of the side file of an image that is opened with `options`.
pub(crate) fn place_of(image: &Path, options: &ImageOptions) -> PathBuf {
    match &options.side_file {
        None => side_file_of(image),
        Some(side) if side.path.is_dir() => side.path.join(name_in_folder(image)),
        Some(side) => side.path.clone(),
    }
}

/// The name of an image's side file in a folder of side files: the image's absolute path without
/// the first `/`, or its address, with `!` in place of `/`, and the suffix.
fn name_in_folder(image: &Path) -> PathBuf {
    let whole = match Location::of(image) {
        Ok(Location::File(path)) => std::path::absolute(&path).unwrap_or(path),
        _ => image.to_owned(),
    };
    let bytes = whole.as_os_str().as_bytes();
    let bytes = bytes.strip_prefix(b"/").unwrap_or(bytes);
    let mut name: Vec<u8> =
        bytes.iter().map(|&byte| if byte == b'/' { b'!' } else { byte }).collect();
    name.extend_from_slice(SIDE_FILE_SUFFIX.as_bytes());
    OsStr::from_bytes(&name).into()
}

/// A raw image in the form in which it is opened as the data of its side file.
pub(crate) enum RawImage {
    /// The file that the side file names.
    Named(OwnedFd),
    /// The volume that the user named. Messages use this name, and not the one in the side file.
    Volume(PathBuf, RawVolume),
}

/// The source of a volume.
pub(crate) enum RawVolume {
    /// A file or device of this host, to be opened.
    Found(OwnedFd),
    /// The volume is open.
    Open(Box<ImageStorage>),
    /// Another process hands the volume over.
    HandedOver,
}

/// Whether an image is opened through a side file.
pub(crate) enum Found {
    /// The image is not raw, or has no side file.
    Nothing,
    /// The image is opened through this side file: `side_file` is its path, and `file` is open.
    /// `image` was in the state `seen` when it was checked.
    Belongs { side_file: PathBuf, file: OwnedFd, image: RawImage, seen: Seen },
    /// The side file is not used, for this reason.
    Strange(Error),
}

/// Finds the side file of an image to be opened.
///
/// # Errors
/// Errors of the host, or of the server or cluster that has the image.
pub(crate) async fn find(image: &Path, options: &ImageOptions) -> Result<Found> {
    let location = Location::of(image)?;
    let format = options.format.unwrap_or_else(|| format_by_name(image));
    if format != ImageFormat::Raw || options.part.is_some() {
        return Ok(Found::Nothing);
    }
    let path = place_of(image, options);
    let is_elsewhere = options.side_file.is_some();
    if let (Location::File(image), false) = (&location, is_elsewhere)
        && let Some(why) = behind_link(image)
    {
        return Ok(Found::Strange(why));
    }
    let is_there = match &location {
        Location::File(image) if !is_elsewhere => is_file(image) && is_file(&path),
        _ => is_elsewhere && is_file(&path),
    };
    if !is_there {
        return Ok(Found::Nothing);
    }
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
    let (raw, volume, owner) = open_volume(image, &location, options).await?;
    let is_named = !is_elsewhere;
    let checked = check(is_named.then_some(image), (&volume, owner), &file, options).await;
    let why = match checked {
        Ok(None) => {
            let raw = match raw {
                RawVolume::Found(file) if is_named => RawImage::Named(file),
                raw => RawImage::Volume(image.to_owned(), raw),
            };
            return Ok(Found::Belongs {
                side_file: path,
                file: found,
                image: raw,
                seen: volume.seen,
            });
        }
        why => why,
    };
    close_volume(raw).await?;
    let why = why?.unwrap_or_default();
    Ok(Found::Strange(
        unused(&format!("{}: {why}", path.display()))
            .hint("remove that file, add a bitmap, and make a full backup"),
    ))
}

/// Opens a volume; returns its identity and owner.
async fn open_volume(
    image: &Path,
    location: &Location,
    options: &ImageOptions,
) -> Result<(RawVolume, Volume, Option<u32>)> {
    match location {
        Location::File(path) => {
            // With a side file beside the image, the path is not a symbolic link: `find` has
            // checked that.
            let path = match options.side_file {
                None => Cow::Borrowed(path),
                Some(_) => Cow::Owned(path.canonicalize().map_err(|error| {
                    Error::host("cannot open", error).on(&path.display().to_string())
                })?),
            };
            let (found, file) = open_found(&path)?;
            let owner = status_of(&file)?.st_uid;
            let volume = Volume::of_file(&file).await?;
            Ok((RawVolume::Found(found), volume, Some(owner)))
        }
        Location::Nbd { .. } | Location::Rbd(_) | Location::Null(_) => {
            let (storage, _) = open_location(&mut Files::Host, image, options).await?;
            let volume = Volume::of(&storage).await?;
            Ok((RawVolume::Open(Box::new(storage)), volume, None))
        }
    }
}

/// Closes a volume that is not used.
pub(crate) async fn close_volume(volume: RawVolume) -> Result<()> {
    match volume {
        RawVolume::Open(storage) => storage.close().await,
        RawVolume::Found(_) | RawVolume::HandedOver => Ok(()),
    }
}

/// Opens an image or its side file twice: by `O_PATH`, to be reopened, and for reading. The path
/// must not be a symbolic link.
pub(crate) fn open_found(path: &Path) -> Result<(OwnedFd, HostFile)> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let found = rustix::fs::open(path, flags, Mode::empty());
    let found = found.map_err(|error| {
        Error::host("cannot open", error.into()).on(&path.display().to_string())
    })?;
    let file = HostFile::open_found(found.as_fd(), path, OpenMode::ReadOnly, PageCache::Used)?;
    Ok((found, file))
}

/// Whether a path is that of a regular file, and not of a symbolic link to one.
pub(crate) fn is_file(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|found| found.is_file())
}

/// The error if the path is a symbolic link to an image with a side file. That side file is not
/// used, because otherwise each of the two names could have its own side file.
fn behind_link(image: &Path) -> Option<Error> {
    if !std::fs::symlink_metadata(image).ok()?.is_symlink() {
        return None;
    }
    let target = std::fs::canonicalize(image).ok()?;
    let side_file = side_file_of(&target);
    is_file(&side_file).then(|| {
        let (side_file, image) = (side_file.display(), image.display());
        unused(&format!("{side_file}: {image} is a symbolic link to its image"))
            .hint(format!("name the image itself: {}", target.display()))
    })
}

/// The file through which an image is opened: its own file, or its side file.
pub(crate) struct Route<'a> {
    pub(crate) path: Cow<'a, Path>,
    pub(crate) options: Cow<'a, ImageOptions>,
    through: Through,
}

enum Through {
    /// The image's own file.
    Itself,
    /// A side file that was found to belong to an image in the state `seen`.
    SideFile { file: OwnedFd, image: Mutex<Option<RawImage>>, seen: Seen },
    /// A side file that another process has checked and has open. The path is that of the image, if
    /// the side file is not beside it.
    HandedOver(Option<PathBuf>),
}

/// # Errors
/// Errors of the host.
pub(crate) async fn route<'a>(
    files: &Files,
    image: &'a Path,
    options: &'a ImageOptions,
) -> Result<Route<'a>> {
    let (side_file, through) = match files {
        Files::Host => match find(image, options).await? {
            Found::Belongs { side_file, file, image, seen } => {
                let image = Mutex::new(Some(image));
                (Some(side_file), Through::SideFile { file, image, seen })
            }
            Found::Strange(why) => {
                tracing::warn!("{why}");
                (None, Through::Itself)
            }
            Found::Nothing => (None, Through::Itself),
        },
        Files::HandedOver(..) => {
            let path = place_of(image, options);
            let name = options.side_file.is_some().then(|| image.to_owned());
            if files.is_next(&path) {
                (Some(path), Through::HandedOver(name))
            } else {
                (None, Through::Itself)
            }
        }
    };
    Ok(match side_file {
        Some(path) => {
            let options = ImageOptions { format: Some(ImageFormat::Qcow2), ..options.clone() };
            Route { path: path.into(), options: Cow::Owned(options), through }
        }
        None => Route { path: image.into(), options: Cow::Borrowed(options), through },
    })
}

impl<'a> Route<'a> {
    /// The route through an image's own file, even if a side file is beside it.
    pub(crate) fn itself(path: &'a Path, options: &'a ImageOptions) -> Self {
        Self { path: path.into(), options: Cow::Borrowed(options), through: Through::Itself }
    }

    /// Opens the file.
    ///
    /// # Errors
    /// As [`open_location`].
    pub(crate) async fn open(&self, files: &mut Files) -> Result<(ImageStorage, Option<Identity>)> {
        let Through::SideFile { file, .. } = &self.through else {
            return open_location(files, &self.path, &self.options).await;
        };
        let (mode, cache) = (self.options.open_mode(), self.options.cache.page_cache());
        let file = HostFile::open_found(file.as_fd(), &self.path, mode, cache)?;
        let identity = file_identity(&file)?;
        Ok((file.into(), Some(identity)))
    }

    /// The raw image that the user named, if a side file was found to belong to it; returned once.
    /// `disk` is the image opened through this route, without its data file.
    ///
    /// # Errors
    /// `InvalidInput` if a side file is opened for writing by its own name, because no check has
    /// found that the side file belongs to its image.
    pub(crate) fn raw_image(&self, disk: &StoredImage) -> Result<Option<RawImage>> {
        match &self.through {
            Through::SideFile { image, .. } => Ok(image.lock().take()),
            Through::HandedOver(name) => {
                Ok(name.as_ref().map(|name| RawImage::Volume(name.clone(), RawVolume::HandedOver)))
            }
            Through::Itself
                if self.options.access == Access::ReadWrite
                    && disk.format().header().data_file_mark().is_some() =>
            {
                let what =
                    "holds the bitmaps of a raw image, and is changed together with it alone";
                Err(Error::new(ErrorKind::InvalidInput, what)
                    .on(disk.name())
                    .hint("name the raw image instead: the same path without '.bitmaps', or what --bitmaps goes with"))
            }
            Through::Itself => Ok(None),
        }
    }

    /// Repeats the checks when the disk is open and locked, but not yet changed.
    ///
    /// # Errors
    /// `InvalidInput` if another program has changed or replaced the image since. Host errors.
    pub(crate) async fn confirm(&self, disk: &StoredImage) -> Result<()> {
        let Through::SideFile { seen, .. } = &self.through else { return Ok(()) };
        let refuse = |what: &str| {
            let error = Error::new(ErrorKind::InvalidInput, what.to_owned());
            Err(error.on(disk.name()).hint("try again"))
        };
        let Some(mark) = disk.format().header().data_file_mark() else {
            return refuse("another program has changed the file while it was opened");
        };
        let is_it = disk.format().is_fully_allocated() && {
            let volume = Volume::of(disk.format().data().storage()).await?;
            let is_unchanged = self.options.locking != Locking::Held || volume.seen == *seen;
            is_unchanged && volume.identity == mark.identity
        };
        if is_it {
            Ok(())
        } else {
            refuse("another program has changed the image while it was opened")
        }
    }
}

/// The reason why a side file does not belong to a volume of this owner; `None` if it belongs. If
/// `named` is given, the side file must name a file with the file name of `named`.
async fn check(
    named: Option<&Path>,
    (volume, owned_by): (&Volume, Option<u32>),
    file: &HostFile,
    options: &ImageOptions,
) -> Result<Option<String>> {
    let side_file = match SideFileHeader::read(file).await {
        Ok(Some(side_file)) => side_file,
        Ok(None) => return Ok(Some("is no image with the bitmaps of a raw one".into())),
        Err(error) if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported) => {
            return Ok(Some(format!("cannot be used: {error}")));
        }
        Err(error) => return Err(error),
    };
    let owner = status_of(file)?.st_uid;
    let owners = [owned_by, Some(rustix::process::geteuid().as_raw()), Some(0)];
    if !owners.contains(&Some(owner)) {
        return Ok(Some("is owned by another user than the image".into()));
    }
    let has_name =
        named.is_none_or(|image| image.file_name().map(OsStr::as_bytes) == Some(&side_file.name));
    if !has_name || volume.identity != side_file.identity {
        let what = match named {
            Some(_) => "belongs to another file, or to one that was replaced",
            None => "belongs to another volume, or to one that was replaced",
        };
        return Ok(Some(what.into()));
    }
    if volume.size != side_file.size && Some(volume.size) != side_file.other_size {
        let (size, wanted) = (volume.size, side_file.size);
        return Ok(Some(format!("is of a disk of {wanted} bytes, and the image has {size}")));
    }
    let is_alone = options.side_file.as_ref().is_some_and(|side| side.is_alone);
    Ok(match told(&side_file, volume.seen, file, options)? {
        Told::Unchanged => None,
        Told::Nothing if is_alone => None,
        Told::Nothing if named.is_none() => Some(
            "may lack changes: nothing tells whether the volume was changed without it \
             (--trust-bitmaps says that nobody else writes to it)"
                .into(),
        ),
        Told::Nothing | Told::Changed => Some(
            "may lack changes: the image was changed without it, or nothing tells that it was not"
                .into(),
        ),
    })
}

/// Whether a volume in the state `seen` has changes that its side file may lack.
fn told(
    side_file: &SideFileHeader,
    seen: Seen,
    file: &HostFile,
    options: &ImageOptions,
) -> Result<Told> {
    if !side_file.has_enabled {
        return Ok(Told::Unchanged);
    }
    if !side_file.is_live {
        return Ok(told_by_close(side_file.changed, seen));
    }
    // A server that has the image open records its changes.
    if options.locking != Locking::Held && is_being_written(file) {
        return Ok(Told::Unchanged);
    }
    let dir = options.state.directory();
    Ok(match seen {
        Seen::Time(changed) => {
            Told::of(is_as_left(changed, file, dir)? || is_vouched_for(changed, side_file.voucher))
        }
        Seen::Writes(writes) => told_by_state(writes.as_secs(), file, dir)?,
        Seen::Unknown => Told::Nothing,
    })
}

/// Whether an image is unchanged since its server was killed while it recorded changes, according
/// to the state file.
fn is_as_left(changed: Duration, file: &HostFile, dir: Option<&StateDir>) -> Result<bool> {
    Ok(find_state(file, dir)?.is_some_and(|state| {
        let last_write = Duration::from_nanos(state.page().last_data_write());
        changed <= last_write + MAX_DELAY
    }))
}

/// As `is_as_left`, for a device: compares the amount written to it with the amount that the server
/// has sent.
fn told_by_state(now: u64, file: &HostFile, dir: Option<&StateDir>) -> Result<Told> {
    let sent = find_state(file, dir)?.map_or(0, |state| state.page().device_writes());
    Ok(told_by_count(sent, now))
}

fn unused(why: &str) -> Error {
    Error::new(ErrorKind::InvalidInput, format!("{why}; its bitmaps are not used"))
}
