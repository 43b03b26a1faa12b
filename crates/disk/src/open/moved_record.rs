//! The record beside an image that its disk was moved elsewhere, or was about to be: `IMAGE.moved`.
//!
//! Guarantee: an image that has the record is not opened for writing, so no guest goes on with a disk that another one
//! has changed since. The record is written durably before the other image becomes complete. It is there, too, where a
//! server ended in the moment in between: then the other image tells which one is the disk, because it cannot be opened unless it is complete
//! (`tools/incomplete_mark`).

use std::fs::{OpenOptions, remove_file};
use std::io::{ErrorKind as IoErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use blockhouse_core::{Error, ErrorKind, Result};

use super::durable_rename::sync_folder;

/// The most bytes of a record that are read.
const MAX_RECORD: usize = 4096;

fn record_of(image: &Path) -> PathBuf {
    let mut name = image.as_os_str().to_owned();
    name.push(".moved");
    name.into()
}

/// Notes durably that the disk of an image is moved to `successor`, its name for people.
///
/// # Errors
/// One that names the record: the host refuses.
pub fn record_moved(image: &Path, successor: &str) -> Result<()> {
    let record = record_of(image);
    let write = || {
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&record)?;
        file.write_all(successor.as_bytes())?;
        file.write_all(b"\n")?;
        file.sync_all()
    };
    write().map_err(|error| Error::host("cannot write", error).on(&record.to_string_lossy()))?;
    sync_folder(&record)
}

/// Takes the record away, if there is one: the image's disk is where it was.
///
/// # Errors
/// One that names the record: the host refuses.
pub fn forget_moved(image: &Path) -> Result<()> {
    let record = record_of(image);
    match remove_file(&record) {
        Ok(()) => sync_folder(&record),
        Err(error) if error.kind() == IoErrorKind::NotFound => Ok(()),
        Err(error) => Err(Error::host("cannot remove", error).on(&record.to_string_lossy())),
    }
}

/// Refuses an image whose disk was moved.
///
/// # Errors
/// `InvalidInput`, with where the disk is and what to do.
pub(super) fn check_not_moved(image: &Path) -> Result<()> {
    let record = record_of(image);
    let Ok(mut text) = std::fs::read(&record) else { return Ok(()) };
    text.truncate(MAX_RECORD);
    let successor = String::from_utf8_lossy(&text);
    let (successor, record) = (successor.trim_end().escape_debug(), record.display());
    let what = format!("its disk was moved to '{successor}', or a server ended while it was");
    Err(Error::new(ErrorKind::InvalidInput, what).on(&image.to_string_lossy()).hint(format!(
        "use '{successor}' if it opens; if it says that it is not complete, remove {record} and use this image"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_refuses_the_image_until_it_is_forgotten() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("disk.img");
        assert!(check_not_moved(&image).is_ok());
        forget_moved(&image).unwrap();
        record_moved(&image, "/new/disk.qcow2").unwrap();
        record_moved(&image, "nbd://host/disk").unwrap();
        let error = check_not_moved(&image).unwrap_err().to_string();
        assert!(error.contains("'nbd://host/disk'") && error.contains("disk.img.moved"), "{error}");
        forget_moved(&image).unwrap();
        assert!(check_not_moved(&image).is_ok());
    }
}
