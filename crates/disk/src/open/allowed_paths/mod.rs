//! Which files an image may name as its backing file or its data file.
//!
//! Guarantees: a file that an image names is opened only if it lies below the folder of that image, as a regular
//! file, or below a path that the user has allowed. The file is found without being opened (`O_PATH`), judged, and
//! then opened by what was found: a name that is exchanged meanwhile changes nothing. Reason: images come from
//! strangers, and a name in one reaches any file of the host that this process may open (CVE-2024-32498 of
//! OpenStack). A path that the user gives on a command line is not restricted.

mod beneath;

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockhouse_core::{Error, ErrorKind, Result};
use blockhouse_storage::Location;
use rustix::fs::{CWD, FileType, Mode, OFlags, Stat, fstat, openat};
use rustix::io::Errno;

use beneath::{Symlinks, find_anywhere, find_beneath};

/// What images may name beside regular files below their own folders. Cloning shares it.
#[derive(Clone, Debug, Default)]
pub struct AllowedPaths {
    roots: Arc<[Root]>,
}

/// A path that the user allows.
#[derive(Debug)]
struct Root {
    descriptor: OwnedFd,
    path: PathBuf,
    is_folder: bool,
}

/// The folder from which the names of an image are looked up.
#[derive(Debug)]
pub(super) struct Folder {
    /// `None` where an image was found through a folder that may not be named itself.
    descriptor: Option<OwnedFd>,
    path: PathBuf,
}

/// A file that may be opened, and the folder for the names in it.
#[derive(Debug)]
pub(super) struct Found {
    /// `O_PATH`: no data can be read by it.
    pub(super) descriptor: OwnedFd,
    pub(super) folder: Folder,
}

/// Why a file that an image names is not found.
#[derive(Debug)]
pub(super) enum FindError {
    /// The image may not name it. The error names the image and the option.
    Refused(Error),
    /// The host's error, on the file's path.
    Host(Error),
}

impl From<Error> for FindError {
    fn from(error: Error) -> Self {
        Self::Host(error)
    }
}

/// Why a name is not followed.
#[derive(Debug)]
enum Refusal {
    /// It leads out of the folder of its image.
    Outside,
    /// It is no regular file, and not allowed by its path.
    NotRegular(&'static str),
    /// The host refuses.
    Host(Errno),
}

impl From<Errno> for Refusal {
    fn from(error: Errno) -> Self {
        Self::Host(error)
    }
}

impl AllowedPaths {
    /// Allows these folders, with all regular files and block devices below them, and these files. They are
    /// opened now: a folder that is renamed later stays allowed.
    ///
    /// # Errors
    /// One that names the path: it is missing, or the host refuses.
    pub fn new<P: AsRef<Path>>(paths: &[P]) -> Result<Self> {
        let roots = paths.iter().map(|path| Root::open(path.as_ref())).collect::<Result<_>>()?;
        Ok(Self { roots })
    }

    /// Whether an image at this path may name this file without any allowed path. `false` also for a file that
    /// is missing outside of the image's folder.
    pub fn is_free_to_name(image: &Path, name: &[u8]) -> bool {
        let Ok(folder) = Folder::of_image(image) else { return true };
        match Self::default().look_up(&folder, Path::new(OsStr::from_bytes(name))) {
            Ok(_) | Err(Refusal::Host(_)) => true,
            Err(Refusal::Outside | Refusal::NotRegular(_)) => false,
        }
    }

    /// Finds the file that `image` names as its `role` ("backing file").
    ///
    /// # Errors
    /// Where the image may not name it, and what the host answers.
    pub(super) fn find(
        &self,
        folder: &Folder,
        name: &[u8],
        role: &str,
        image: &str,
    ) -> Result<Found, FindError> {
        let path = folder.join(name);
        let found = self.look_up(folder, Path::new(OsStr::from_bytes(name)));
        let named = String::from_utf8_lossy(name);
        found.map_err(|refusal| match refusal {
            Refusal::Host(error) => {
                let error = Error::host("cannot open", error.into());
                FindError::Host(error.on(&path.display().to_string()))
            }
            Refusal::Outside => refused(
                image,
                format!("names '{named}' as its {role}, which is not below the image's own folder"),
                "--allow-path FOLDER, a folder that the file is in",
            ),
            Refusal::NotRegular(kind) => refused(
                image,
                format!("names '{named}' as its {role}, which is {kind} and no regular file"),
                "--allow-path DEVICE, if it is a block device",
            ),
        })
    }

    /// Whether `image` may name this image on another server as its `role`: the files of this host that TLS with the server
    /// takes lie below an allowed path. Reason: whoever made the image could otherwise show another user's certificate.
    ///
    /// # Errors
    /// The image may not name it, or the name cannot be used.
    pub(super) fn check_remote(
        &self,
        name: &Path,
        role: &str,
        image: &str,
    ) -> Result<(), FindError> {
        let location = Location::of(name)?;
        let Some(path) = location.local_path() else { return Ok(()) };
        self.locate(&Folder::of_remote(), path).map(drop).map_err(|_| {
            let path = path.display();
            refused(
                image,
                format!("names a {role} on another server that takes the files of TLS in '{path}'"),
                "--allow-path FOLDER, an absolute path that these files are below",
            )
        })
    }

    fn look_up(&self, folder: &Folder, name: &Path) -> Result<Found, Refusal> {
        let (descriptor, is_allowed) = self.locate(folder, name)?;
        let status = fstat(&descriptor)?;
        match FileType::from_raw_mode(status.st_mode) {
            FileType::RegularFile => {}
            FileType::BlockDevice if is_allowed || self.allows_file(&status) => {}
            other => return Err(Refusal::NotRegular(describe(other))),
        }
        let path = folder.path.join(name).parent().unwrap_or(Path::new("")).to_owned();
        let parent = match name.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let below = self.locate(folder, parent).ok().map(|(descriptor, _)| descriptor);
        Ok(Found { descriptor, folder: Folder { descriptor: below, path } })
    }

    /// What a name leads to, and whether an allowed path covers it.
    fn locate(&self, folder: &Folder, name: &Path) -> Result<(OwnedFd, bool), Refusal> {
        let below = folder.descriptor.as_ref().map(OwnedFd::as_fd);
        if let Some(below) = below.filter(|_| name.is_relative()) {
            match find_beneath(below, name, Symlinks::Beneath) {
                Ok(descriptor) => return Ok((descriptor, false)),
                Err(Errno::XDEV | Errno::LOOP) => {}
                Err(error) => return Err(error.into()),
            }
        }
        // A name that is absolute, or that leaves the folder on its way, may end below it all the same.
        let from = match below {
            Some(below) => below,
            None if name.is_absolute() => CWD,
            None => return Err(Refusal::Outside),
        };
        let found = match find_anywhere(from, name) {
            Ok(found) => found,
            // Whether a file is missing is told only of what may be named.
            Err(error) if self.is_text_below(folder, name) => return Err(error.into()),
            Err(_) => return Err(Refusal::Outside),
        };
        if let Some(below) = below
            && let Some(descriptor) = reach(below, found.as_fd())?
        {
            return Ok((descriptor, false));
        }
        for root in self.roots.iter() {
            if root.is_folder
                && let Some(descriptor) = reach(root.descriptor.as_fd(), found.as_fd())?
            {
                return Ok((descriptor, true));
            }
            if !root.is_folder && is_same(root.descriptor.as_fd(), found.as_fd())? {
                return Ok((found, true));
            }
        }
        Err(Refusal::Outside)
    }

    fn allows_file(&self, status: &Stat) -> bool {
        let is_it = |root: &Root| {
            fstat(&root.descriptor).is_ok_and(|one| identity(&one) == identity(status))
        };
        self.roots.iter().any(is_it)
    }

    /// Whether the text of a name lies below what may be named.
    fn is_text_below(&self, folder: &Folder, name: &Path) -> bool {
        let has_parent = name.components().any(|part| part == std::path::Component::ParentDir);
        let whole = folder.path.join(name);
        let roots = self.roots.iter().map(|root| root.path.as_path());
        let real = folder.descriptor.as_ref().and_then(|folder| real_path(folder.as_fd()).ok());
        !has_parent
            && (name.is_relative()
                || real.is_some_and(|real| whole.starts_with(real))
                || roots
                    .chain([folder.path.as_path()])
                    .any(|root| !root.as_os_str().is_empty() && whole.starts_with(root)))
    }
}

impl Folder {
    /// The folder of an image that the user named by this path.
    pub(super) fn of_image(image: &Path) -> Result<Self> {
        let path = image.parent().unwrap_or(Path::new("")).to_owned();
        let at = if path.as_os_str().is_empty() { Path::new(".") } else { &path };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let descriptor = openat(CWD, at, flags, Mode::empty()).map_err(|error| {
            Error::host("cannot open the folder", error.into()).on(&at.display().to_string())
        })?;
        Ok(Self { descriptor: Some(descriptor), path })
    }

    /// A folder by which nothing is opened: its files are handed over.
    pub(super) fn of_handed_over(image: &Path) -> Self {
        Self { descriptor: None, path: image.parent().unwrap_or(Path::new("")).to_owned() }
    }

    /// Of an image on another server: no relative name of it leads to a file of this host.
    pub(super) fn of_remote() -> Self {
        Self { descriptor: None, path: PathBuf::new() }
    }

    /// The path of a file that an image of this folder names.
    pub(super) fn join(&self, name: &[u8]) -> PathBuf {
        self.path.join(OsStr::from_bytes(name))
    }
}

impl Root {
    fn open(path: &Path) -> Result<Self> {
        let failed = |error: Errno| {
            let error = Error::host("cannot be an allowed path", error.into());
            error.on(&path.display().to_string()).hint("name a folder or file that exists")
        };
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let descriptor = openat(CWD, path, flags, Mode::empty()).map_err(failed)?;
        let status = fstat(&descriptor).map_err(failed)?;
        let is_folder = FileType::from_raw_mode(status.st_mode).is_dir();
        Ok(Self { descriptor, path: path.to_owned(), is_folder })
    }
}

/// The file `found`, opened again from `root` down without any symlink; `None` where it does not lie below `root`.
fn reach(root: BorrowedFd<'_>, found: BorrowedFd<'_>) -> Result<Option<OwnedFd>, Refusal> {
    // Without /proc there is no telling where it lies.
    let (Ok(top), Ok(real)) = (real_path(root), real_path(found)) else { return Ok(None) };
    let Ok(rest) = real.strip_prefix(&top) else { return Ok(None) };
    let rest = if rest.as_os_str().is_empty() { Path::new(".") } else { rest };
    let Ok(descriptor) = find_beneath(root, rest, Symlinks::None) else { return Ok(None) };
    Ok(is_same(descriptor.as_fd(), found)?.then_some(descriptor))
}

/// Where an open file lies now.
fn real_path(file: BorrowedFd<'_>) -> Result<PathBuf, Errno> {
    use std::os::fd::AsRawFd;
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    let path = rustix::fs::readlinkat(CWD, link, Vec::new())?;
    Ok(std::ffi::OsString::from_vec(path.into_bytes()).into())
}

fn is_same(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> Result<bool, Errno> {
    Ok(identity(&fstat(one)?) == identity(&fstat(other)?))
}

fn identity(status: &Stat) -> (u64, u64) {
    (status.st_dev, status.st_ino)
}

fn describe(kind: FileType) -> &'static str {
    match kind {
        FileType::Directory => "a directory",
        FileType::BlockDevice => "a block device",
        FileType::CharacterDevice => "a character device",
        FileType::Fifo => "a pipe",
        FileType::Socket => "a socket",
        _ => "of an unknown kind",
    }
}

fn refused(image: &str, what: String, option: &str) -> FindError {
    let hint = format!("only if you trust whoever made the image, allow it: {option}");
    FindError::Refused(Error::new(ErrorKind::InvalidInput, what).on(image).hint(hint))
}

#[cfg(test)]
mod tests;
