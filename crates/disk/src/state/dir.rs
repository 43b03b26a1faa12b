//! The directory of state files.
//!
//! Guarantees: the directory belongs to this user, and no other user may enter it, because a user
//! who can write to a state file can change the file's image. The directory is in memory (tmpfs),
//! so that a store into a mapped file never waits for a disk. All files are opened relative to the
//! checked descriptor of the directory, also if the directory is renamed.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockhouse_core::{Error, ErrorKind, Result};
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, Uid, chownat, fstat, fstatfs, mkdirat,
    openat, renameat_with, statat, statfs, unlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;

use super::identity::BootId;

/// `TMPFS_MAGIC` from `<linux/magic.h>`.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// A directory of state files. Clones are the same directory.
#[derive(Clone, Debug)]
pub struct StateDir {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    directory: OwnedFd,
    boot: BootId,
    /// The owner of the directory.
    user: u32,
}

/// Makes a directory that belongs to another user: under another name until it does. That name is
/// random, because any user could take a known one.
fn make_for(path: &Path, user: u32) -> rustix::io::Result<()> {
    let random = RandomState::new().hash_one(path);
    let aside = path.with_file_name(format!(".blockhouse-{random:x}"));
    mkdirat(CWD, &aside, Mode::RWXU)?;
    let user = Some(Uid::from_raw(user));
    let made = chownat(CWD, &aside, user, None, AtFlags::SYMLINK_NOFOLLOW)
        .and_then(|()| renameat_with(CWD, &aside, CWD, path, RenameFlags::NOREPLACE));
    if made.is_err() {
        // The error of the change is returned.
        let _ = unlinkat(CWD, &aside, AtFlags::REMOVEDIR);
    }
    made
}

impl StateDir {
    /// Opens the directory at `path`; creates it if it is missing.
    ///
    /// # Errors
    /// The directory cannot be made or opened, belongs to another user, may be entered by others,
    /// or is not on tmpfs. The error names the directory.
    pub fn create(path: &Path) -> Result<Self> {
        Self::create_for(path, geteuid().as_raw())
    }

    /// As [`create`](Self::create), for the user that this process will run as: that user owns the
    /// directory and its files. The directory has its name only when it belongs to that user, so a
    /// process that is killed leaves no directory of another user.
    ///
    /// # Errors
    /// As [`create`](Self::create); also if this process may not give a file to the user.
    pub fn create_for(path: &Path, user: u32) -> Result<Self> {
        let failed = |error: Errno| {
            let failed = Error::host("cannot make the state directory", error.into());
            failed.on(&path.display().to_string()).hint(ELSEWHERE)
        };
        let made = match statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) if user != geteuid().as_raw() => make_for(path, user),
            Err(Errno::NOENT) => mkdirat(CWD, path, Mode::RWXU),
            found => found.map(drop),
        };
        match made {
            Ok(()) | Err(Errno::EXIST) => Self::open_for(path, user),
            Err(error) => Err(failed(error)),
        }
    }

    /// Opens the directory at `path`, which must exist.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_for(path, geteuid().as_raw())
    }

    fn open_for(path: &Path, user: u32) -> Result<Self> {
        let name = path.display().to_string();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = openat(CWD, path, flags, Mode::empty()).map_err(|error| {
            let failed = match error {
                Errno::ACCESS | Errno::LOOP | Errno::NOTDIR => {
                    let what = "the state directory's name belongs to something else";
                    Error::new(ErrorKind::InvalidInput, what)
                }
                error => Error::host("cannot open the state directory", error.into()),
            };
            failed.on(&name).hint(ELSEWHERE)
        })?;
        let examined = |error: Errno| Error::host("cannot examine", error.into()).on(&name);
        let status = fstat(&directory).map_err(examined)?;
        let refuse = |what: &'static str, hint: &'static str| {
            Err(Error::new(ErrorKind::InvalidInput, what).on(&name).hint(hint))
        };
        if status.st_uid != user {
            return refuse(
                "the state directory belongs to another user, who could change images by it",
                ELSEWHERE,
            );
        }
        if Mode::from_raw_mode(status.st_mode).intersects(Mode::RWXG | Mode::RWXO) {
            return refuse(
                "other users may enter the state directory, and could change images by it",
                "take their rights away (chmod 700), or name another directory with --state DIR",
            );
        }
        if fstatfs(&directory).map_err(examined)?.f_type as u64 != TMPFS_MAGIC {
            return refuse(
                "the state directory is not in memory (tmpfs), so a server might have to wait for a disk",
                "name one in /dev/shm or on another tmpfs with --state DIR, or use --state off",
            );
        }
        let boot = BootId::current().map_err(|error| {
            let what = "cannot find the boot's id, by which a state file of another boot is known";
            Error::host(what, error).on(&name).hint("mount /proc, or use --state off")
        })?;
        Ok(Self { inner: Arc::new(Inner { path: path.to_owned(), directory, boot, user }) })
    }

    /// The default directory of this user's state files, which may not exist yet. It is
    /// `/run/blockhouse` (root) or `$XDG_RUNTIME_DIR/blockhouse` (others) if the parent is on
    /// tmpfs, and `/dev/shm/blockhouse-UID` otherwise.
    ///
    /// # Errors
    /// `Unsupported` if neither parent is on tmpfs.
    pub fn default_path() -> Result<PathBuf> {
        let user = geteuid();
        let own = if user.is_root() {
            Some(PathBuf::from("/run"))
        } else {
            std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from)
        };
        let own = own.filter(|parent| is_on_tmpfs(parent)).map(|parent| parent.join("blockhouse"));
        let shared = Path::new("/dev/shm");
        let shared = || {
            let name = format!("blockhouse-{}", user.as_raw());
            is_on_tmpfs(shared).then(|| shared.join(name))
        };
        own.or_else(shared).ok_or_else(|| {
            let what = "there is no directory in memory (tmpfs) for state files";
            Error::new(ErrorKind::Unsupported, what).hint(ELSEWHERE)
        })
    }

    /// As [`default_path`](Self::default_path), for the user that this process will run as, without
    /// that user's environment: `/run/blockhouse` (root) or `/dev/shm/blockhouse-UID`.
    pub fn default_path_for(user: u32) -> PathBuf {
        match user {
            0 => PathBuf::from("/run/blockhouse"),
            _ => PathBuf::from(format!("/dev/shm/blockhouse-{user}")),
        }
    }

    /// The directory at [`default_path`](Self::default_path), if it exists and only this user may
    /// enter it.
    pub fn find_default() -> Option<Self> {
        let opened = Self::default_path().and_then(|path| Self::open(&path));
        opened.inspect_err(|error| tracing::debug!("no state files are looked for: {error}")).ok()
    }

    /// The directory's path, as it was given.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// The boot of the host in which the directory was opened.
    pub fn boot(&self) -> BootId {
        self.inner.boot
    }

    /// The owner of the directory.
    pub(super) fn user(&self) -> u32 {
        self.inner.user
    }

    pub(super) fn directory(&self) -> BorrowedFd<'_> {
        self.inner.directory.as_fd()
    }

    /// The path of a file in the directory, for messages.
    pub(super) fn path_of(&self, name: &str) -> String {
        self.inner.path.join(name).display().to_string()
    }

    /// An error of an operation on a file in the directory.
    pub(super) fn failed(&self, what: &'static str, name: &str, error: io::Error) -> Error {
        Error::host(what, error).on(&self.path_of(name))
    }
}

/// The hint about a directory that cannot be used.
pub(super) const ELSEWHERE: &str = "name another directory with --state DIR, or use --state off";

fn is_on_tmpfs(path: &Path) -> bool {
    statfs(path).is_ok_and(|system| system.f_type as u64 == TMPFS_MAGIC)
}

/// Whether a file in a state directory is a regular file of `user`, so that it may be trusted.
pub(super) fn is_own_file(file: impl AsFd, user: u32) -> io::Result<bool> {
    let status = fstat(file)?;
    let is_regular = FileType::from_raw_mode(status.st_mode) == FileType::RegularFile;
    Ok(is_regular && status.st_uid == user)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;

    fn refused(path: &Path) -> String {
        StateDir::create(path).expect_err("it is refused").to_string()
    }

    #[test]
    fn a_directory_is_made_for_this_user_alone() {
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        let path = folder.path().join("state");
        assert!(StateDir::open(&path).is_err(), "not made by looking for it");
        StateDir::create(&path).expect("it can be made");
        assert_eq!(fs::metadata(&path).expect("it is there").permissions().mode() & 0o777, 0o700);
        StateDir::create(&path).expect("it is there already");
    }

    #[test]
    fn a_directory_for_another_user_has_its_name_only_when_it_is_complete() {
        if !geteuid().is_root() {
            return;
        }
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        let path = folder.path().join("state");
        StateDir::create_for(&path, 1).expect("it can be made");
        StateDir::create_for(&path, 1).expect("it is there already");
        let made = fs::metadata(&path).expect("it is there");
        assert_eq!((made.uid(), made.permissions().mode() & 0o777), (1, 0o700));
        StateDir::create_for(&path, 2).expect_err("it is another user's");
        assert_eq!(make_for(&path, 2), Err(Errno::EXIST));
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1);
    }

    #[test]
    fn directories_that_others_could_use_are_refused() {
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
        let path = folder.path().join("state");
        assert!(refused(&folder.path().join("missing/state")).contains("--state off"));
        fs::write(&path, "").expect("a file");
        assert!(refused(&path).contains("belongs to something else"));
        fs::remove_file(&path).expect("it is there");
        fs::create_dir(folder.path().join("other")).expect("a directory");
        symlink("other", &path).expect("a link");
        assert!(refused(&path).contains("belongs to something else"));
        fs::remove_file(&path).expect("it is there");
        StateDir::create(&path).expect("it can be made");
        for mode in [0o701, 0o770, 0o755, 0o1777] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).expect("it is ours");
            assert!(refused(&path).contains("chmod 700"), "{mode:o}");
        }
    }

    #[test]
    fn directories_on_disks_are_refused() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder on a disk");
        assert!(refused(&folder.path().join("state")).contains("tmpfs"));
    }
}
