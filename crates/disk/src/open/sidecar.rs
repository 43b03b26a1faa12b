//! The sidecar of a raw image: `IMAGE.bitmaps` beside it, which has its persistent bitmaps.
//!
//! A raw image has no room for them. Its sidecar is a qcow2 image without data, whose data file is the raw image. A raw image that
//! has one is opened through it, so all that holds for the bitmaps of qcow2 images holds for those of raw ones.
//!
//! Guarantee: a sidecar is used for the file that it was made for alone, and only if nothing has changed that without
//! it. It *belongs* to an image where
//!
//! - the image is the file that the sidecar was made for, by inode and birth, with the size that it had;
//! - none of its bitmaps is enabled, or the image has the time of change (`ctime`, which no program can set) that the sidecar
//!   noted when it was closed;
//! - or the sidecar was not closed, because its server died: then the image was not changed after the last write that this
//!   server noted in its state file, or where the host has restarted since, not since it has.
//!
//! What is in doubt does not belong. Then the image is opened without bitmaps, and a warning says why. The time is looked at before
//! the image is locked, and once more after ([`Route::confirm`]).

use std::borrow::Cow;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blockhouse_core::{Error, ErrorKind, Result, Storage};
use blockhouse_engine::{HostFile, OpenMode, PageCache};
use blockhouse_format::ImageFormat;
use blockhouse_format::qcow2::Sidecar;
use blockhouse_storage::Location;
use rustix::time::{ClockId, clock_gettime};

use super::create::format_by_name;
use super::handed_over::Files;
use super::image_disk::ImageDisk;
use super::image_options::{ImageOptions, Locking};
use super::lock::is_being_written;
use super::restore::{Clock, change_time, clock_of, find_state, identity_of, status_of};
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
    /// Through this one. The image was changed for the last time at `seen`.
    Belongs { sidecar: PathBuf, seen: Duration },
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
    let disk = HostFile::open(&image, OpenMode::ReadOnly, PageCache::Used)?;
    let file = match HostFile::open(&path, OpenMode::ReadOnly, PageCache::Used) {
        Ok(file) => file,
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
        None => Found::Belongs { sidecar: path, seen },
        Some(why) => Found::Strange(
            unused(&format!("{}: {why}", path.display()))
                .hint("remove that file, add a bitmap, and make a full backup"),
        ),
    })
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
    Sidecar { seen: Duration },
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
            Found::Belongs { sidecar, seen } => (Some(sidecar), Through::Sidecar { seen }),
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

impl Route<'_> {
    /// Whether what was found still holds, now that the disk is open and locked.
    ///
    /// # Errors
    /// `InvalidInput` where another program has changed the image meanwhile, and where a sidecar is opened for writing by its own
    /// name: nothing has found out whether it belongs to its image. The host's.
    pub(super) fn confirm(&self, disk: &ImageDisk) -> Result<()> {
        let is_writer = self.options.access == Access::ReadWrite;
        match self.through {
            Through::HandedOver => Ok(()),
            Through::Itself if is_writer && disk.format().is_sidecar() => {
                let what =
                    "holds the bitmaps of a raw image, and is changed together with it alone";
                let hint = "name the raw image instead: the same path without '.bitmaps'";
                Err(Error::new(ErrorKind::InvalidInput, what).on(disk.name()).hint(hint))
            }
            Through::Itself => Ok(()),
            Through::Sidecar { seen } if self.options.locking == Locking::Held => {
                let file = disk.format().data().storage().as_file();
                match file.map(status_of).transpose()? {
                    Some(status) if change_time(&status) != seen => {
                        let what = "another program has changed the image while it was opened";
                        let error = Error::new(ErrorKind::InvalidInput, what).on(disk.name());
                        Err(error.hint("try again"))
                    }
                    _ => Ok(()),
                }
            }
            Through::Sidecar { .. } => Ok(()),
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
    let name = image.file_name().map(OsStr::as_bytes);
    if name != Some(&sidecar.name) || identity(disk)? != sidecar.identity {
        return Ok(Some("belongs to another file, or to one that was replaced".into()));
    }
    if disk.size() != sidecar.size {
        let (size, wanted) = (disk.size(), sidecar.size);
        return Ok(Some(format!("is of a disk of {wanted} bytes, and the image has {size}")));
    }
    // A server that has the image open changes it, and records that.
    let is_shared = options.locking == Locking::None && is_being_written(file);
    let is_unchanged = match (sidecar.has_enabled, sidecar.is_live) {
        (false, _) => true,
        (true, false) => changed == sidecar.changed,
        (true, true) => is_shared || is_as_left(disk, changed, file, options.state.directory())?,
    };
    Ok((!is_unchanged).then(|| "lacks changes: the image was changed without it".into()))
}

/// Whether an image is as the server left it that died while it recorded changes.
fn is_as_left(
    disk: &HostFile,
    changed: Duration,
    file: &HostFile,
    dir: Option<&StateDir>,
) -> Result<bool> {
    if clock_of(disk)? != Clock::ThisHost {
        return Ok(false);
    }
    Ok(match find_state(file, dir)? {
        Some(state) => {
            let last_write = Duration::from_nanos(state.page().last_data_write());
            changed <= last_write + MAX_DELAY
        }
        None => changed < boot_time(),
    })
}

/// When the host started, since the Unix epoch.
fn boot_time() -> Duration {
    let up = clock_gettime(ClockId::Boottime);
    let up = Duration::new(up.tv_sec.try_into().unwrap_or(0), up.tv_nsec as u32);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.saturating_sub(up)
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
