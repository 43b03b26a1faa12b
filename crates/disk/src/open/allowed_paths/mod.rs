//! Which files an image may name as its backing file or its data file.
//!
//! Guarantees: a file that an image names is opened only if it lies below the folder of that image,
//! as a regular file and not hidden, or below a path that the user has allowed. It is written to
//! only if the user has allowed it, or if it was made as the data file of this image
//! (`data_files`). The file is looked up without opening it (`O_PATH`), checked, and then opened
//! through that descriptor: a name that is replaced meanwhile has no effect. Reason: images may be
//! untrusted, and a name in one can refer to any file of the host that this process may open
//! (CVE-2024-32498 of OpenStack). A path that the user gives on a command line is not restricted.

mod beneath;
mod data_files;

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use blockhouse_core::{Error, ErrorKind, Result};
use blockhouse_storage::Location;
use rustix::fs::{CWD, FileType, Mode, OFlags, Stat, fstat, openat};
use rustix::io::Errno;

use beneath::{Symlinks, find_anywhere, find_beneath};
pub(super) use data_files::Namer;
pub use data_files::note_data_file;

/// The files that images may name in addition to regular files below their own folders. Cloning
/// shares it.
#[derive(Clone, Debug, Default)]
pub struct AllowedPaths {
    roots: Arc<[Root]>,
    /// Images on other servers that may be named, with the files and users of this host in their
    /// names.
    remote: Arc<[Location]>,
    /// The hint if no name is followed at all.
    refuses_all: Option<&'static str>,
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
    /// `None` if an image was found through a folder that may not be named itself.
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

/// The use of a file that an image names.
#[derive(Clone, Copy, Debug)]
pub(super) enum NameUse<'a> {
    /// It is read, or its change was requested by the user (a commit).
    Asked,
    /// Its data is read as the data of this image.
    Read(Namer<'a>),
    /// It is written to because this image names it.
    Written(Namer<'a>),
}

impl NameUse<'_> {
    /// Whether a user of this host chose the file for the image, wherever it lies.
    fn is_chosen(self, name: &Path) -> bool {
        match self {
            Self::Asked => false,
            Self::Read(image) | Self::Written(image) => {
                image.is_chosen_by_owner(name.as_os_str().as_bytes())
            }
        }
    }
}

/// Location of a file that an image names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Below the folder of the image.
    Own,
    /// Below the folder of the image, and a name on the way begins with a dot.
    Hidden,
    /// Below an allowed path, or chosen for the image by its owner.
    Allowed,
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
    /// It is outside of its image's folder.
    Outside,
    /// A name on the way to it begins with a dot.
    Hidden,
    /// It is not a regular file, and its path is not allowed.
    NotRegular(&'static str),
    /// It would be written to, but was not made as the data file of its image.
    NotItsOwn,
    /// The host refuses.
    Host(Errno),
}

impl From<Errno> for Refusal {
    fn from(error: Errno) -> Self {
        Self::Host(error)
    }
}

impl AllowedPaths {
    /// Allows these folders, with all regular files and block devices below them, and these files.
    /// They are opened now: a folder that is renamed later stays allowed. The address of an image
    /// on another server allows that image, with the files and the user of this host that it names.
    ///
    /// # Errors
    /// A path is missing, the host refuses it, or an address is invalid. The error names it.
    pub fn new<P: AsRef<Path>>(paths: &[P]) -> Result<Self> {
        let is_remote = |path: &&P| Location::is_remote(path.as_ref().as_os_str().as_bytes());
        let (remote, paths): (Vec<_>, Vec<_>) = paths.iter().partition(is_remote);
        let roots = paths.iter().map(|path| Root::open(path.as_ref())).collect::<Result<_>>()?;
        let remote =
            remote.iter().map(|name| Location::of(name.as_ref())).collect::<Result<_>>()?;
        Ok(Self { roots, remote, refuses_all: None })
    }

    /// No file or server that an image names is opened, because the user said so.
    pub fn refusing_all() -> Self {
        Self::none("leave --no-references out, if you know who made the image")
    }

    /// No file or server that an image names is opened; `hint` is the advice in the error.
    pub fn none(hint: &'static str) -> Self {
        Self { refuses_all: Some(hint), ..Self::default() }
    }

    /// The files and folders of this host that are allowed.
    pub(super) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.roots.iter().map(|root| &*root.path)
    }

    /// Whether no name is followed at all.
    pub fn is_none(&self) -> bool {
        self.refuses_all.is_some()
    }

    /// Refuses a name if none is followed.
    fn check_any(&self, name: &[u8], role: &str, image: &str) -> Result<(), FindError> {
        let Some(hint) = self.refuses_all else { return Ok(()) };
        let name = String::from_utf8_lossy(name);
        let what = format!("names '{name}' as its {role}, and no name in it is followed");
        let error = Error::new(ErrorKind::InvalidInput, what).on(image);
        Err(FindError::Refused(error.hint(hint)))
    }

    /// Whether an image at this path may name this file, to be read, without any allowed path.
    /// `false` also for a file that is missing outside of the image's folder.
    pub fn is_free_to_name(image: &Path, name: &[u8]) -> bool {
        Self::is_free(image, name, NameUse::Asked)
    }

    /// As [`is_free_to_name`](Self::is_free_to_name), to be written to as the image's data file.
    pub fn is_free_to_write(image: &Path, name: &[u8]) -> bool {
        let file = openat(CWD, image, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok();
        let file = file.as_ref().map(OwnedFd::as_fd);
        Self::is_free(image, name, NameUse::Written(Namer { path: image, file }))
    }

    fn is_free(image: &Path, name: &[u8], used: NameUse<'_>) -> bool {
        let Ok(folder) = Folder::of_image(image) else { return true };
        let found = Self::default().look_up(&folder, Path::new(OsStr::from_bytes(name)), used);
        matches!(found, Ok(_) | Err(Refusal::Host(_)))
    }

    /// Finds the file that `image` names as its `role` ("backing file").
    ///
    /// # Errors
    /// If the image may not name it; errors of the host.
    pub(super) fn find(
        &self,
        folder: &Folder,
        name: &[u8],
        role: &str,
        image: &str,
        used: NameUse<'_>,
    ) -> Result<Found, FindError> {
        self.check_any(name, role, image)?;
        let path = folder.join(name);
        let found = self.look_up(folder, Path::new(OsStr::from_bytes(name)), used);
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
            Refusal::Hidden => refused(
                image,
                format!("names '{named}' as its {role}, which is hidden: a name on its way begins with a dot"),
                "--allow-path FILE",
            ),
            Refusal::NotItsOwn => refused(
                image,
                format!(
                    "names '{named}' as its {role}, and nothing but its name says that this file is to be written to"
                ),
                "--allow-path FILE; reading it needs no option",
            ),
            Refusal::NotRegular(kind) => refused(
                image,
                format!("names '{named}' as its {role}, which is {kind} and no regular file"),
                "--allow-path DEVICE, if it is a block device",
            ),
        })
    }

    /// Checks that `image` may name this image on another server as its `role`: the files of this
    /// host that TLS with the server needs must lie below an allowed path. Reason: the image's
    /// author could otherwise use another user's certificate. An image never chooses a
    /// configuration or a user of Ceph: Ceph's library obeys the configuration, and writes files
    /// that it names.
    ///
    /// # Errors
    /// The image may not name it, or the name cannot be used.
    pub(super) fn check_remote(
        &self,
        name: &Path,
        role: &str,
        image: &str,
    ) -> Result<(), FindError> {
        self.check_any(name.as_os_str().as_bytes(), role, image)?;
        let location = Location::of(name)?;
        if self.remote.contains(&location) {
            return Ok(());
        }
        if let Location::Rbd(rbd) = &location
            && (rbd.configuration().is_some() || rbd.user().is_some())
        {
            let name = name.display();
            return Err(refused(
                image,
                format!(
                    "names '{name}' as its {role}: an image chooses no configuration (conf=) and no user (id=)"
                ),
                &format!("name it on the command line, by --allow-path '{name}'"),
            ));
        }
        let Some(path) = location.local_path() else { return Ok(()) };
        self.locate(&Folder::of_remote(), path, NameUse::Asked).map(drop).map_err(|_| {
            let path = path.display();
            refused(
                image,
                format!("names a {role} on another server that takes the files of TLS in '{path}'"),
                "--allow-path FOLDER, an absolute path that these files are below",
            )
        })
    }

    fn look_up(&self, folder: &Folder, name: &Path, used: NameUse<'_>) -> Result<Found, Refusal> {
        let (descriptor, place) = self.locate(folder, name, used)?;
        match FileType::from_raw_mode(fstat(&descriptor)?.st_mode) {
            _ if place == Place::Hidden => return Err(Refusal::Hidden),
            FileType::RegularFile => {}
            FileType::BlockDevice if place == Place::Allowed => {}
            other => return Err(Refusal::NotRegular(describe(other))),
        }
        if let (NameUse::Written(image), Place::Own) = (used, place)
            && !image.owns(folder, name.as_os_str().as_bytes(), descriptor.as_fd())
        {
            return Err(Refusal::NotItsOwn);
        }
        let path = folder.path.join(name).parent().unwrap_or(Path::new("")).to_owned();
        let parent = match name.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let below =
            self.locate(folder, parent, NameUse::Asked).ok().map(|(descriptor, _)| descriptor);
        Ok(Found { descriptor, folder: Folder { descriptor: below, path } })
    }

    /// The file that a name leads to, and its place.
    fn locate(
        &self,
        folder: &Folder,
        name: &Path,
        used: NameUse<'_>,
    ) -> Result<(OwnedFd, Place), Refusal> {
        let below = folder.descriptor.as_ref().map(OwnedFd::as_fd);
        if let Some(below) = below.filter(|_| name.is_relative()) {
            match find_beneath(below, name, Symlinks::Beneath) {
                Ok(found) => return self.placed(folder, name, found),
                Err(Errno::XDEV | Errno::LOOP) => {}
                Err(error) => return Err(error.into()),
            }
        }
        // An absolute name, or one that leaves the folder on its way, may still end below it.
        let from = match below {
            Some(below) => below,
            None if name.is_absolute() => CWD,
            None => return Err(Refusal::Outside),
        };
        let found = match find_anywhere(from, name) {
            Ok(found) => found,
            // Only for paths that may be named, the error shows whether the file is missing.
            Err(error) if self.is_text_below(folder, name) => return Err(error.into()),
            Err(_) => return Err(Refusal::Outside),
        };
        if let Some(below) = below
            && let Some(descriptor) = reach(below, found.as_fd())?
        {
            return self.placed(folder, name, descriptor);
        }
        match self.allowed(found.as_fd())? {
            Some(found) => Ok((found, Place::Allowed)),
            None if used.is_chosen(name) => Ok((found, Place::Allowed)),
            None => Err(Refusal::Outside),
        }
    }

    /// A file below the folder of its image, and whether it is hidden there or allowed.
    fn placed(
        &self,
        folder: &Folder,
        name: &Path,
        found: OwnedFd,
    ) -> Result<(OwnedFd, Place), Refusal> {
        let real = folder.real().zip(real_path(found.as_fd()).ok());
        let leads_hidden = real
            .is_some_and(|(folder, found)| found.strip_prefix(folder).is_ok_and(has_hidden_part));
        let place = match self.allowed(found.as_fd())? {
            Some(_) => Place::Allowed,
            None if leads_hidden || (name.is_relative() && has_hidden_part(name)) => Place::Hidden,
            None => Place::Own,
        };
        Ok((found, place))
    }

    /// The file, opened again from the allowed path that it lies below; `None` if it lies below
    /// none.
    fn allowed(&self, found: BorrowedFd<'_>) -> Result<Option<OwnedFd>, Refusal> {
        for root in self.roots.iter() {
            let reached = if root.is_folder {
                reach(root.descriptor.as_fd(), found)?
            } else {
                is_same(root.descriptor.as_fd(), found)?
                    .then(|| found.try_clone_to_owned().map_err(|_| Errno::MFILE))
                    .transpose()?
            };
            if reached.is_some() {
                return Ok(reached);
            }
        }
        Ok(None)
    }

    /// Whether the text of a name lies below an allowed folder.
    fn is_text_below(&self, folder: &Folder, name: &Path) -> bool {
        let has_parent = name.components().any(|part| part == Component::ParentDir);
        let whole = folder.path.join(name);
        let roots = self.roots.iter().map(|root| root.path.as_path());
        let real = folder.real();
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

    /// A folder through which no file is opened, because its files are handed over.
    pub(super) fn of_handed_over(image: &Path) -> Self {
        Self { descriptor: None, path: image.parent().unwrap_or(Path::new("")).to_owned() }
    }

    /// For an image on another server: no relative name in it leads to a file of this host.
    pub(super) fn of_remote() -> Self {
        Self { descriptor: None, path: PathBuf::new() }
    }

    /// The current path of the folder.
    fn real(&self) -> Option<PathBuf> {
        self.descriptor.as_ref().and_then(|folder| real_path(folder.as_fd()).ok())
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

/// The file `found`, opened again from `root` down without any symlink; `None` if it does not lie
/// below `root`.
fn reach(root: BorrowedFd<'_>, found: BorrowedFd<'_>) -> Result<Option<OwnedFd>, Refusal> {
    // Without /proc its location cannot be determined.
    let (Ok(top), Ok(real)) = (real_path(root), real_path(found)) else { return Ok(None) };
    let Ok(rest) = real.strip_prefix(&top) else { return Ok(None) };
    let rest = if rest.as_os_str().is_empty() { Path::new(".") } else { rest };
    let Ok(descriptor) = find_beneath(root, rest, Symlinks::None) else { return Ok(None) };
    Ok(is_same(descriptor.as_fd(), found)?.then_some(descriptor))
}

/// The current path of an open file.
fn real_path(file: BorrowedFd<'_>) -> Result<PathBuf, Errno> {
    use std::os::fd::AsRawFd;
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    let path = rustix::fs::readlinkat(CWD, link, Vec::new())?;
    Ok(std::ffi::OsString::from_vec(path.into_bytes()).into())
}

fn is_same(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> Result<bool, Errno> {
    Ok(identity(&fstat(one)?) == identity(&fstat(other)?))
}

/// Whether a name of the path begins with a dot.
fn has_hidden_part(path: &Path) -> bool {
    let is_hidden =
        |part| matches!(part, Component::Normal(name) if name.as_bytes().starts_with(b"."));
    path.components().any(is_hidden)
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
    let hint = format!("if you trust the maker of the image, allow it: {option}");
    FindError::Refused(Error::new(ErrorKind::InvalidInput, what).on(image).hint(hint))
}

#[cfg(test)]
mod tests;
