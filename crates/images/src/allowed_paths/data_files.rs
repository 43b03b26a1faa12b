//! The data file that may be written to without an allowed path: the file that was created for its
//! image.
//!
//! Either of two signs distinguishes this file from another user's disk. The image's file has an
//! extended attribute with the name of the data file, which `create` and `convert` set and an
//! upload cannot set. Or the data file is in the image's folder and is named after the image:
//! `disk.raw`, `disk-data.img` and `disk.qcow2.data` belong to `disk.qcow2`. A data file in another
//! folder, or a block device, needs the attribute; the image must belong to root or to the user who
//! opens it, and no group or other user may have write permission.

use std::ffi::OsStr;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{Mode, XattrFlags, fgetxattr, fstat, setxattr};
use rustix::process::geteuid;

use super::{Folder, real_path};

/// The extended attribute of an image's file: the name of its data file, as in the image.
const NOTED: &str = "user.blockhouse.data-file";

/// An image that names a file to be written to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Namer<'a> {
    pub(crate) path: &'a Path,
    /// The image's own file, whose extended attribute counts; `None` if no attribute counts.
    pub(crate) file: Option<BorrowedFd<'a>>,
}

impl Namer<'_> {
    /// Whether the file found by this name was made for the image.
    pub(super) fn owns(&self, folder: &Folder, name: &[u8], found: BorrowedFd<'_>) -> bool {
        self.file.is_some_and(|file| is_noted(file, name)) || self.is_called_after(folder, found)
    }

    /// Whether the image has this name in its extended attribute, belongs to root or the user who
    /// opens it, and has no write permission for its group and other users. Its data file may be in
    /// any folder, and may be a block device.
    pub(super) fn is_chosen_by_owner(&self, name: &[u8]) -> bool {
        let Some(file) = self.file.filter(|file| is_noted(*file, name)) else { return false };
        fstat(file).is_ok_and(|status| {
            let is_trusted = status.st_uid == 0 || status.st_uid == geteuid().as_raw();
            let writers = Mode::from_raw_mode(status.st_mode) & (Mode::WGRP | Mode::WOTH);
            is_trusted && writers.is_empty()
        })
    }

    fn is_called_after(&self, folder: &Folder, found: BorrowedFd<'_>) -> bool {
        let real = folder.real().zip(real_path(found).ok());
        let Some((folder, found)) = real else { return false };
        let (Some(stem), Some(name)) = (self.path.file_stem(), found.file_name()) else {
            return false;
        };
        found.parent() == Some(&folder) && is_called_after(stem, name)
    }
}

/// Whether `name` is `stem`, then a dot, a hyphen or an underscore, then at least one more byte.
fn is_called_after(stem: &OsStr, name: &OsStr) -> bool {
    let rest = name.as_bytes().strip_prefix(stem.as_bytes());
    rest.is_some_and(|rest| matches!(rest, [b'.' | b'-' | b'_', _, ..]))
}

fn is_noted(image: BorrowedFd<'_>, name: &[u8]) -> bool {
    // One byte more than the name, so a longer value does not match.
    let mut noted = vec![0; name.len() + 1];
    fgetxattr(image, NOTED, &mut noted[..]).is_ok_and(|length| noted.get(..length) == Some(name))
}

/// Records that the user named this data file for the image at `path`: commands may write to it
/// from now on. On a file system without extended attributes nothing is recorded, and the file's
/// name decides.
pub fn note_data_file(path: &Path, name: &[u8]) {
    let _ = setxattr(path, NOTED, name, XattrFlags::empty());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_data_file_is_called_after_its_image() {
        let is = |stem: &str, name: &str| is_called_after(OsStr::new(stem), OsStr::new(name));
        for name in ["disk.raw", "disk-data.img", "disk_1", "disk.qcow2.data"] {
            assert!(is("disk", name), "{name}");
        }
        for name in ["disk", "disk.", "disk2.raw", "other.raw", "dis", "Disk.raw", ""] {
            assert!(!is("disk", name), "{name}");
        }
    }
}
