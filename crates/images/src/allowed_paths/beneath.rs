//! Finds a file below a folder: by `openat2` and `RESOLVE_BENEATH`, or step by step if the kernel
//! or a filter of system calls refuses that call.
//!
//! Guarantees: the path of the file found stays below the folder at each step, and nothing is
//! opened for reading or writing (`O_PATH`), so devices and pipes on the path are not affected.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2, readlinkat};
use rustix::io::{Errno, Result};

/// The maximum number of symlinks that are followed in one path, as in Linux (path_resolution(7)).
const MAX_SYMLINKS: usize = 40;

const FIND: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);

/// Which symlinks are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Symlinks {
    /// Symlinks that lead to files below the folder.
    Beneath,
    /// No symlinks: the path is resolved already.
    None,
}

/// The file of a relative name whose path stays below `folder` at each step.
///
/// # Errors
/// EXDEV for a name that leads out of the folder or is absolute; ELOOP for a symlink that is not
/// followed; else the kernel's error.
pub(super) fn find_beneath(
    folder: BorrowedFd<'_>,
    name: &Path,
    symlinks: Symlinks,
) -> Result<OwnedFd> {
    let mut resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    if symlinks == Symlinks::None {
        resolve |= ResolveFlags::NO_SYMLINKS;
    }
    loop {
        match openat2(folder, name, FIND, Mode::empty(), resolve) {
            // Retry: a concurrent rename or mount made the target of a `..` unknown (openat2(2)).
            Err(Errno::AGAIN) => {}
            Err(Errno::NOSYS | Errno::PERM) => return walk_beneath(folder, name, symlinks),
            outcome => return outcome,
        }
    }
}

/// The file of a name, in any folder. Links in /proc to open files are followed only without
/// `openat2`.
///
/// # Errors
/// The kernel's error.
pub(super) fn find_anywhere(folder: BorrowedFd<'_>, name: &Path) -> Result<OwnedFd> {
    match openat2(folder, name, FIND, Mode::empty(), ResolveFlags::NO_MAGICLINKS) {
        Err(Errno::NOSYS | Errno::PERM) => openat(folder, name, FIND, Mode::empty()),
        outcome => outcome,
    }
}

/// As [`find_beneath`], without `openat2`: opens a descriptor for each step of the path.
pub(super) fn walk_beneath(
    folder: BorrowedFd<'_>,
    name: &Path,
    symlinks: Symlinks,
) -> Result<OwnedFd> {
    let mut above = vec![openat(folder, c".", FIND, Mode::empty())?];
    let mut steps = steps_of(name.as_os_str())?;
    let mut followed = 0;
    while let Some(step) = steps.pop_front() {
        let last = above.last().ok_or(Errno::XDEV)?.as_fd();
        if matches!(step.as_bytes(), b"" | b"." | b"..") {
            check_is_folder(last)?;
            if step == ".." {
                above.pop();
            }
            if above.is_empty() {
                return Err(Errno::XDEV);
            }
            continue;
        }
        let found = openat(last, &step, FIND | OFlags::NOFOLLOW, Mode::empty())?;
        if kind_of(found.as_fd())? != FileType::Symlink {
            above.push(found);
            continue;
        }
        followed += 1;
        if symlinks == Symlinks::None || followed > MAX_SYMLINKS {
            return Err(Errno::LOOP);
        }
        let target = OsString::from_vec(readlinkat(&found, c"", Vec::new())?.into_bytes());
        for step in steps_of(&target)?.into_iter().rev() {
            steps.push_front(step);
        }
    }
    above.pop().ok_or(Errno::XDEV)
}

/// The steps of a relative path; each step except the last must lead to a folder.
fn steps_of(path: &OsStr) -> Result<VecDeque<OsString>> {
    let bytes = path.as_bytes();
    match bytes.first() {
        None => Err(Errno::NOENT),
        Some(b'/') => Err(Errno::XDEV),
        Some(_) => Ok(bytes
            .split(|byte| *byte == b'/')
            .map(|step| OsStr::from_bytes(step).into())
            .collect()),
    }
}

/// # Errors
/// ENOTDIR.
fn check_is_folder(file: BorrowedFd<'_>) -> Result<()> {
    match kind_of(file)? {
        FileType::Directory => Ok(()),
        _ => Err(Errno::NOTDIR),
    }
}

fn kind_of(file: BorrowedFd<'_>) -> Result<FileType> {
    Ok(FileType::from_raw_mode(fstat(file)?.st_mode))
}
