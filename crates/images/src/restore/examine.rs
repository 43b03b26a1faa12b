//! Queries the host about an image's file.

use std::io;
use std::path::Path;

use blockhouse_core::{Error, Result, Storage};
use blockhouse_engine::HostFile;
use rustix::fs::{Stat, fstat};

use blockhouse_disk::{FoundState, ImageIdentity, Owner, StateDir, StateFile};

/// The identity of an image's file.
///
/// # Errors
/// The host's, with the file's name.
pub(crate) fn identity_of(file: &HostFile) -> Result<ImageIdentity> {
    examined(file, ImageIdentity::of(file.descriptor()))
}

/// The identity of an image's file by which its state file is found.
///
/// # Errors
/// As [`identity_of`].
pub(super) fn lasting_identity_of(file: &HostFile) -> Result<ImageIdentity> {
    examined(file, ImageIdentity::lasting(file.descriptor()))
}

fn examined<T>(file: &HostFile, found: io::Result<T>) -> Result<T> {
    found.map_err(|error| Error::host("cannot examine", error).on(file.name()))
}

/// The owner of a new state file.
///
/// # Errors
/// As [`identity_of`].
pub(crate) fn owner_of(file: &HostFile, path: &Path, dir: &StateDir) -> Result<Owner> {
    let image = lasting_identity_of(file)?;
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    Ok(Owner { boot: dir.boot(), image, path, process: std::process::id() })
}

/// The status of an image's file (`fstat`).
///
/// # Errors
/// As [`identity_of`].
pub(crate) fn status_of(file: &HostFile) -> Result<Stat> {
    examined(file, fstat(file.descriptor()).map_err(Into::into))
}

/// The state file of an image in `dir`, if a process left one.
///
/// # Errors
/// The host's.
pub(crate) fn find_state(file: &HostFile, dir: Option<&StateDir>) -> Result<Option<StateFile>> {
    let Some(dir) = dir else { return Ok(None) };
    Ok(match StateFile::find(dir, lasting_identity_of(file)?)? {
        FoundState::Usable(found) => Some(found),
        _ => None,
    })
}
