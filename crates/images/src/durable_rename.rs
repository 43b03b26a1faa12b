//! Renaming a finished file, durably.

use std::fs::{File, Permissions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::Path;

use blockhouse_core::{Error, Result};
use rustix::fs::{CWD, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

/// The treatment of a file that has the name already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IfExists {
    /// The existing file stays, and the rename fails.
    Fail,
    /// The new file replaces the existing file atomically, and gets its mode. It also gets its
    /// owner and group, as far as the kernel lets this process set them.
    Replace,
}

/// Renames the file `from`, whose content is durable, to `to` in the same folder, and makes the
/// name durable.
///
/// # Errors
/// `to` exists and `if_exists` keeps it, or the host refuses; the error names the file. If only the
/// sync fails, the file stays `to` after a rename with [`IfExists::Replace`], and is renamed back
/// with [`IfExists::Fail`] if possible. After any other error the file is still called `from`.
pub fn rename_durable(from: &Path, to: &Path, if_exists: IfExists) -> Result<()> {
    rename_synced(from, to, if_exists, sync)
}

fn rename_synced(
    from: &Path,
    to: &Path,
    if_exists: IfExists,
    sync: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    let renamed = match if_exists {
        IfExists::Replace => {
            keep_rights(from, to)
                .map_err(|error| Error::host("cannot set its mode", error).on(&name(from)))?;
            rustix::fs::rename(from, to)
        }
        IfExists::Fail => rename_noreplace(from, to),
    };
    renamed.map_err(|error| {
        let failed = Error::host("cannot take this name", error.into());
        let failed = failed.on(&name(to));
        match error {
            Errno::EXIST => failed.hint(format!(
                "another program took it meanwhile; the image is {}",
                from.display()
            )),
            _ => failed.hint(format!("the image is complete: {}", from.display())),
        }
    })?;
    sync(to).inspect_err(|_| {
        if if_exists == IfExists::Fail {
            // The first error is returned.
            let _ = rename_noreplace(to, from);
        }
    })
}

/// Makes the new name of a file durable.
fn sync(path: &Path) -> Result<()> {
    // Without this sync, the next durable write on XFS would also have to flush the changes that
    // the rename made to the inode.
    if let Ok(file) = File::open(path) {
        file.sync_all().map_err(|error| Error::host("cannot sync", error).on(&name(path)))?;
    }
    sync_folder(path)
}

fn name(path: &Path) -> String {
    path.display().to_string()
}

/// Gives the file `from` the mode of the file `to`, if `to` exists, and its owner and group if this
/// process may set them.
pub(crate) fn keep_rights(from: &Path, to: &Path) -> std::io::Result<()> {
    let (Ok(old), file) = (std::fs::metadata(to), File::open(from)?) else { return Ok(()) };
    let new = file.metadata()?;
    // Only root may give files away; a group may be set by its members.
    let is_owned = new.uid() == old.uid() || fchown(&file, Some(old.uid()), None).is_ok();
    let has_group = new.gid() == old.gid() || fchown(&file, None, Some(old.gid())).is_ok();
    let mut mode = old.mode() & 0o777;
    if !has_group {
        // These permissions were for another group's members.
        mode &= !0o070;
    }
    // The owner of the new file must keep access to it.
    if !is_owned {
        mode |= 0o600;
    }
    file.set_permissions(Permissions::from_mode(mode))
}

fn rename_noreplace(from: &Path, to: &Path) -> Result<(), Errno> {
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // A file system without this flag.
        Err(Errno::INVAL) => match std::fs::symlink_metadata(to) {
            Ok(_) => Err(Errno::EXIST),
            Err(_) => rustix::fs::rename(from, to),
        },
        outcome => outcome,
    }
}

/// Makes a new name, or the removal of a name, durable. In a folder that may not be read, by
/// syncing the whole file system.
pub(crate) fn sync_folder(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    let synced = match File::open(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            file_in(folder, path).map_err(|_| error).and_then(|file| Ok(rustix::fs::syncfs(file)?))
        }
        opened => opened.and_then(|folder| folder.sync_all()),
    };
    match synced {
        // A file system that has no sync of folders, such as SMB.
        Err(error) if error.kind() == std::io::ErrorKind::InvalidInput => Ok(()),
        Err(error) => Err(Error::host("cannot sync", error).on(&folder.display().to_string())),
        Ok(()) => Ok(()),
    }
}

/// A file of the folder's file system: `path`, or a new file without a name if `path` is removed.
fn file_in(folder: &Path, path: &Path) -> std::io::Result<OwnedFd> {
    File::open(path).map(OwnedFd::from).or_else(|_| {
        let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
        Ok(rustix::fs::open(folder, flags, Mode::RUSR)?)
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use blockhouse_core::ErrorKind;

    use super::*;

    #[test]
    fn a_file_whose_new_name_is_not_durable_has_its_old_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let [part, image] = ["part", "image"].map(|name| folder.path().join(name));
        fs::write(&part, "new").expect("a file");
        let fail = |_: &Path| Err(Error::new(ErrorKind::Io, "cannot sync"));
        rename_synced(&part, &image, IfExists::Fail, fail).expect_err("the sync has failed");
        assert!(part.exists() && !image.exists());
        rename_durable(&part, &image, IfExists::Fail).expect("it can be renamed");
        fs::write(&part, "newer").expect("a file");
        rename_durable(&part, &image, IfExists::Fail).expect_err("the name is taken");
        rename_synced(&part, &image, IfExists::Replace, fail).expect_err("the sync has failed");
        assert_eq!(fs::read(&image).expect("a file"), b"newer");
    }

    #[test]
    fn a_file_system_is_synced_after_the_removal_of_a_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("removed");
        fs::write(&path, "").expect("a file");
        let before = file_in(folder.path(), &path).expect("the file");
        fs::remove_file(&path).expect("it is there");
        let after = file_in(folder.path(), &path).expect("another file");
        let devices = [before, after].map(|file| File::from(file).metadata().expect("it").dev());
        assert_eq!(devices[0], devices[1]);
        assert_eq!(fs::read_dir(folder.path()).expect("the folder").count(), 0);
    }
}
