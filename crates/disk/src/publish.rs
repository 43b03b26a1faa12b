//! Giving a finished file its name, durably.

use std::path::Path;

use blockhouse_core::{Error, Result};
use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;

/// What becomes of a file that has the name already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// It stays, and the new one does not get the name.
    Kept,
    /// The new one takes its place, at one moment.
    Replaced,
}

/// Renames the file `from`, whose content is durable, to `to` in the same folder, and makes the name
/// durable.
///
/// # Errors
/// One that names the file: `to` exists and is to be kept, or the host refuses.
pub fn publish(from: &Path, to: &Path, existing: Existing) -> Result<()> {
    let renamed = match existing {
        Existing::Replaced => rustix::fs::rename(from, to),
        Existing::Kept => rename_if_free(from, to),
    };
    renamed.map_err(|error| {
        let failed = Error::host("cannot take this name", error.into());
        let failed = failed.on(&to.display().to_string());
        match error {
            Errno::EXIST => {
                failed.hint(format!("somebody else took it; the image is {}", from.display()))
            }
            _ => failed.hint(format!("the image is complete: {}", from.display())),
        }
    })?;
    sync_folder(to)
}

fn rename_if_free(from: &Path, to: &Path) -> Result<(), Errno> {
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // A file system that does not know the flag.
        Err(Errno::INVAL) => match std::fs::symlink_metadata(to) {
            Ok(_) => Err(Errno::EXIST),
            Err(_) => rustix::fs::rename(from, to),
        },
        outcome => outcome,
    }
}

/// Makes a new name durable.
pub(crate) fn sync_folder(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    let synced = std::fs::File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(|error| Error::host("cannot sync", error).on(&folder.display().to_string()))
}
