//! Which files an image may name as its backing file or its data file.
//!
//! Guarantees: a file that an image names is opened only if it is a regular, not hidden file below
//! the folder of that image, or lies below a path that the user has allowed, or if the image's
//! owner has chosen it as the image's data file. The file is written to only if the user has
//! allowed its path or requested the change (a commit), or if it was made as the data file of this
//! image (`data_files`). An image whose content is untrusted may name only what lies below an
//! allowed path, and of that only its own data file is written to. The file is found by an `O_PATH`
//! descriptor, checked, and then opened through that descriptor, so the replacement of a name
//! meanwhile has no effect. Reason: images may be untrusted, and a name in an image can refer to
//! any file of the host that this process may open (CVE-2024-32498 of OpenStack). A path that the
//! user gives on a command line is not restricted.

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

/// The files that images may name in addition to regular files below their own folders, or instead
/// of these ([`only`](Self::only)). Clones share the data.
#[derive(Clone, Debug, Default)]
pub struct AllowedPaths {
    roots: Arc<[Root]>,
    /// The allowed images on other servers, each with the local files and the user in its name.
    remote: Arc<[Location]>,
    /// Whether an image may name nothing else: not even files below its own folder.
    are_only: bool,
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
    /// `None` if relative names lead to no file: the image is on another server, is handed over, or
    /// was found through a folder that may not be named itself.
    descriptor: Option<OwnedFd>,
    path: PathBuf,
}

/// A file that may be opened, and the folder for the names in it.
#[derive(Debug)]
pub(super) struct Found {
    /// An `O_PATH` descriptor: no data can be read through it.
    pub(super) descriptor: OwnedFd,
    pub(super) folder: Folder,
}

/// The use of a file that an image names.
#[derive(Clone, Copy, Debug)]
pub(super) enum NameUse<'a> {
    /// The file is read, or the user has requested its change (a commit).
    Asked,
    /// The file is read as data of this image.
    Read(Namer<'a>),
    /// The file is written to because this image names it.
    Written(Namer<'a>),
}

impl NameUse<'_> {
    /// Whether the image's owner has chosen this file for it. Such a file may be in any folder.
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
    /// Below the folder of the image, and a component of its path begins with a dot.
    Hidden,
    /// Below an allowed path, or chosen for the image by its owner.
    Allowed,
}

/// The reason why a file that an image names is not found.
#[derive(Debug)]
pub(super) enum FindError {
    /// The image may not name the file. The error names the image and the option that allows the
    /// file.
    Refused(Error),
    /// An error of the host, which names the file's path.
    Host(Error),
}

impl From<Error> for FindError {
    fn from(error: Error) -> Self {
        Self::Host(error)
    }
}

/// The reason why a name is not followed.
#[derive(Debug)]
enum Refusal {
    /// The file is outside of the image's folder.
    Outside,
    /// A component of the file's path begins with a dot.
    Hidden,
    /// The file is neither a regular file nor a block device whose path is allowed.
    NotRegular(&'static str),
    /// The file would be written to, but was not made as the data file of the image.
    NotItsOwn,
    /// The path of the file is not allowed, and no other file may be named.
    NotAllowed,
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
    /// The paths are opened now, so a folder that is renamed later stays allowed. The address of an
    /// image on another server allows that image, with the local files and the user in the address.
    ///
    /// # Errors
    /// A path is missing, the host refuses it, or an address is invalid. The error names it.
    pub fn new<P: AsRef<Path>>(paths: &[P]) -> Result<Self> {
        let is_remote = |path: &&P| Location::is_remote(path.as_ref().as_os_str().as_bytes());
        let (remote, paths): (Vec<_>, Vec<_>) = paths.iter().partition(is_remote);
        let roots = paths.iter().map(|path| Root::open(path.as_ref())).collect::<Result<_>>()?;
        let remote =
            remote.iter().map(|name| Location::of(name.as_ref())).collect::<Result<_>>()?;
        Ok(Self { roots, remote, are_only: false })
    }

    /// As [`new`](Self::new), and images may name nothing else: not even files below their own
    /// folders, and nothing at all if `paths` is empty. Of these files, only data files that were
    /// made for their images are written to. For images whose content is untrusted.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn only<P: AsRef<Path>>(paths: &[P]) -> Result<Self> {
        Ok(Self::new(paths)?.and_nothing_else())
    }

    /// As [`only`](Self::only), for the same paths.
    #[must_use]
    pub(super) fn and_nothing_else(self) -> Self {
        Self { are_only: true, ..self }
    }

    /// The files and folders of this host that are allowed.
    pub(super) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.roots.iter().map(|root| &*root.path)
    }

    /// Whether no name is followed at all.
    fn is_none(&self) -> bool {
        self.are_only && self.roots.is_empty() && self.remote.is_empty()
    }

    /// Whether images may name nothing but these paths.
    pub fn are_only(&self) -> bool {
        self.are_only
    }

    /// Refuses every name if no name is followed.
    fn check_any(&self, name: &[u8], role: &str, image: &str) -> Result<(), FindError> {
        if !self.is_none() {
            return Ok(());
        }
        let name = String::from_utf8_lossy(name);
        Err(not_allowed(
            image,
            format!("names '{name}' as its {role}, and no name in it is followed"),
        ))
    }

    /// Whether an image at this path may name this file for reading without any allowed path. Also
    /// `false` if the name leads outside of the image's folder and the file is missing.
    pub fn is_free_to_name(image: &Path, name: &[u8]) -> bool {
        Self::is_free(image, name, NameUse::Asked)
    }

    /// As [`is_free_to_name`](Self::is_free_to_name), for writing as the image's data file.
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
                    "names '{named}' as its {role}, and nothing but its name says that this file is to be written to (it may be read)"
                ),
                "--allow-path FILE",
            ),
            Refusal::NotAllowed => not_allowed(
                image,
                format!("names '{named}' as its {role}, which is below none of the allowed paths"),
            ),
            Refusal::NotRegular(kind) => refused(
                image,
                format!("names '{named}' as its {role}, which is {kind} and no regular file"),
                "--allow-path DEVICE, if it is a block device",
            ),
        })
    }

    /// Checks that `image` may name the image `name` on another server as its `role`: the local
    /// files for TLS with that server must lie below an allowed path. Otherwise the image's author
    /// could use another user's certificate. An image never chooses a configuration or a user of
    /// Ceph, because Ceph's library obeys the configuration and writes to files named there.
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
        if self.are_only {
            let name = name.display();
            let what = format!("names '{name}' as its {role}, which is none of the allowed images");
            return Err(not_allowed(image, what));
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
        let located = self.locate(folder, name, used);
        let is_other =
            matches!(located, Err(Refusal::Outside) | Ok((_, Place::Own | Place::Hidden)));
        if self.are_only && is_other {
            return Err(Refusal::NotAllowed);
        }
        let (descriptor, place) = located?;
        match FileType::from_raw_mode(fstat(&descriptor)?.st_mode) {
            _ if place == Place::Hidden => return Err(Refusal::Hidden),
            FileType::RegularFile => {}
            FileType::BlockDevice if place == Place::Allowed => {}
            other => return Err(Refusal::NotRegular(describe(other))),
        }
        if let NameUse::Written(image) = used
            && (place == Place::Own || self.are_only)
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
        // An absolute name, or a path that leaves the folder, may still lead to a file below it.
        let from = match below {
            Some(below) => below,
            None if name.is_absolute() => CWD,
            None => return Err(Refusal::Outside),
        };
        let found = match find_anywhere(from, name) {
            Ok(found) => found,
            // The error says that a file is missing only if its path may be named.
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
            None if !self.are_only && used.is_chosen(name) => Ok((found, Place::Allowed)),
            None => Err(Refusal::Outside),
        }
    }

    /// The file, which is below the folder of its image, and its place.
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

    /// The file, opened again from the allowed path that it lies below; `None` if there is no such
    /// path.
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

    /// Whether a name, by its text alone, leads below the image's folder or an allowed path.
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

    /// A folder through which no file is opened, because the files are handed over.
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
    // Without /proc the file's location cannot be determined.
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

/// Whether a component of the path begins with a dot.
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

/// The error for an image that may name only what is allowed.
fn not_allowed(image: &str, what: String) -> FindError {
    FindError::Refused(Error::new(ErrorKind::InvalidInput, what).on(image).hint(
        "if you know who made the image, name its format where none was named, leave --no-references out where it was \
         said, or allow the file: --allow-path FILE (callers of QEMU's tools: BLOCKHOUSE_ALLOW_PATH=FILE in the environment)",
    ))
}

fn refused(image: &str, what: String, option: &str) -> FindError {
    let hint = format!(
        "if you trust the maker of the image, allow it: {option} (callers of QEMU's tools: BLOCKHOUSE_ALLOW_PATH in the \
         environment)"
    );
    FindError::Refused(Error::new(ErrorKind::InvalidInput, what).on(image).hint(hint))
}

#[cfg(test)]
mod tests;
