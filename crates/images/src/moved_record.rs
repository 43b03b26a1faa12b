//! The record that an image's disk was moved to another image, was about to be moved, or was
//! forked: `IMAGE.moved`, where `IMAGE` is the file itself, not a symbolic link to it.
//!
//! Guarantees: an image with a record, even one that cannot be read, is not opened for writing. So
//! no guest continues on an old version of its disk. The record is written durably before the other
//! image becomes complete. After a crash in between the record already exists. Then the other image
//! decides which of the two is the disk: it can be opened only if it is complete
//! (`disk/tools/incomplete_mark`). A file of that name without the text of a record belongs to
//! another program: it has no effect, and is neither changed nor removed. The record of a file that
//! another one has replaced has no effect, because the disk in the new file was not moved.

use std::fs::{OpenOptions, remove_file, symlink_metadata};
use std::io::{self, ErrorKind as IoErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use blockhouse_core::{Error, ErrorKind, Result};
use blockhouse_disk::ImageIdentity;
use rustix::fs::{Mode, OFlags};

use crate::durable_rename::{IfExists, rename_durable, sync_folder};

/// The first line of a record.
const MAGIC: &[u8] = b"blockhouse: disk moved\n";

/// The line of a fork in a record, after the overlay's name and [`ROLLBACK`] or [`COMMIT`].
const FORK: &str = "\nfork";

/// The text before [`FORK`] while a rollback is about to return the disk to the image.
const ROLLBACK: &str = "\nrollback";

/// The text before [`FORK`] once a commit has begun to copy the overlay into the image.
const COMMIT: &str = "\ncommit";

/// The text before the inode and the birth time of the image's file, on the last line.
const FILE: &str = "\nfile ";

/// The most bytes of a record that are read.
const MAX_RECORD: u64 = 4096;

/// A file with the name of a record.
enum Found {
    Nothing,
    /// Not a record: the file is neither used nor changed.
    Foreign,
    /// The record of a rollback that was carried out, or of a file that another one has replaced:
    /// it has no effect.
    Void,
    /// The name of the new image, and the state of the disk.
    Record {
        moved_to: String,
        stage: Stage,
    },
}

/// The state of an image's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The disk was moved to another image.
    Moved,
    /// The disk continues in an image over this one.
    Forked,
    /// The disk continues in an image over this one, and is about to return to this one.
    Rollback,
    /// The disk continues in an image over this one. A commit may have copied a part of that image
    /// into this one.
    Commit,
}

/// The path of an image's record. A symbolic link has the record of the file that it leads to.
fn record_of(image: &Path) -> PathBuf {
    let mut name = whole(image).into_os_string();
    name.push(".moved");
    name.into()
}

/// The inode and the birth time of an image's file, as a record has them. `None` for a device,
/// whose birth time differs in each boot, for a file system without birth times, and on an error.
fn file_of(image: &Path) -> Option<String> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let file = rustix::fs::open(image, flags, Mode::empty()).ok()?;
    let ImageIdentity { inode, birth, .. } = ImageIdentity::of(file.as_fd()).ok()?;
    (inode != 0 && birth != 0).then(|| format!("{inode:x}-{birth:x}"))
}

fn find(record: &Path) -> io::Result<Found> {
    let is_regular = match symlink_metadata(record) {
        Ok(found) => found.is_file(),
        // No file has a name that is too long.
        Err(error)
            if matches!(error.kind(), IoErrorKind::NotFound | IoErrorKind::InvalidFilename) =>
        {
            return Ok(Found::Nothing);
        }
        Err(error) => return Err(error),
    };
    if !is_regular {
        return Ok(Found::Foreign);
    }
    // Another file may have replaced this file since the check above, and opening a pipe would
    // block.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(record)?;
    if !file.metadata()?.is_file() {
        return Ok(Found::Foreign);
    }
    let mut text = Vec::new();
    file.take(MAX_RECORD).read_to_end(&mut text)?;
    Ok(match text.strip_prefix(MAGIC) {
        Some(text) => {
            let text = String::from_utf8_lossy(text);
            let text = text.trim_end();
            let (text, file) = text.rsplit_once(FILE).unwrap_or((text, ""));
            let image = record.with_extension("");
            if !file.is_empty() && file_of(&image).is_some_and(|now| now != file) {
                return Ok(Found::Void);
            }
            let forked = text.strip_suffix(FORK);
            let back = forked.and_then(|forked| forked.strip_suffix(ROLLBACK));
            let committed = forked.and_then(|forked| forked.strip_suffix(COMMIT));
            let moved_to = back.or(committed).or(forked).unwrap_or(text);
            // The overlay's removal is the single step that makes this image the disk again.
            let is_gone = || match symlink_metadata(moved_to) {
                Ok(_) => Ok(false),
                Err(error) if error.kind() == IoErrorKind::NotFound => Ok(true),
                Err(error) => Err(error),
            };
            if back.is_some() && is_gone()? {
                return Ok(Found::Void);
            }
            let moved_to = moved_to.to_owned();
            let stage = match (forked, back, committed) {
                (None, ..) => Stage::Moved,
                (_, Some(_), _) => Stage::Rollback,
                (_, _, Some(_)) => Stage::Commit,
                _ => Stage::Forked,
            };
            Found::Record { moved_to, stage }
        }
        None => Found::Foreign,
    })
}

fn found_beside(image: &Path) -> Result<Found> {
    let record = record_of(image);
    find(&record).map_err(|error| Error::host("cannot read", error).on(&record.to_string_lossy()))
}

/// Records durably that the disk of an image is moved to `moved_to`, the new image's name for
/// messages.
///
/// # Errors
/// The error names the record: host errors; `InvalidInput` if another file has its name.
pub fn record_moved(image: &Path, moved_to: &str) -> Result<()> {
    write_record(image, moved_to)
}

/// Records durably that the disk of an image continues in `overlay`, for which this image is the
/// backing file.
///
/// # Errors
/// As [`record_moved`].
pub fn record_forked(image: &Path, overlay: &Path) -> Result<()> {
    write_record(image, &format!("{}{FORK}", whole(overlay).display()))
}

/// Records durably that the disk of an image continues in `overlay` until that file is removed, and
/// is in this image again afterwards. The path of `overlay` is canonical, UTF-8, and one line.
///
/// # Errors
/// As [`record_moved`].
pub(crate) fn record_rollback(image: &Path, overlay: &Path) -> Result<()> {
    write_record(image, &format!("{}{ROLLBACK}{FORK}", overlay.display()))
}

/// As [`record_forked`], for a commit that is about to copy the overlay into the image.
///
/// # Errors
/// As [`record_moved`].
pub fn record_committed(image: &Path, overlay: &Path) -> Result<()> {
    write_record(image, &format!("{}{COMMIT}{FORK}", whole(overlay).display()))
}

/// Refuses an image if a commit may have changed it since the fork: it then no longer has the
/// content that the disk had at the fork.
///
/// # Errors
/// `InvalidInput`; the host's.
pub(crate) fn check_not_committed(image: &Path) -> Result<()> {
    if !has_commit_begun(image)? {
        return Ok(());
    }
    let what = "a commit has begun to change it, and it is not what the disk was any more";
    let error = Error::new(ErrorKind::InvalidInput, what).on(&image.to_string_lossy());
    Err(error.hint("commit the disk again"))
}

/// Whether a record shows that a commit has begun to copy the overlay into the image.
///
/// # Errors
/// The host's.
pub(crate) fn has_commit_begun(image: &Path) -> Result<bool> {
    let found = found_beside(image)?;
    Ok(matches!(found, Found::Record { stage: Stage::Commit, .. }))
}

/// If a rollback was not carried out, records durably that the disk continues in its overlay, even
/// if the overlay is lost later.
///
/// # Errors
/// As [`record_moved`].
pub(crate) fn end_rollback(image: &Path) -> Result<()> {
    let found = found_beside(image)?;
    match found {
        Found::Record { moved_to, stage: Stage::Rollback } => {
            write_record(image, &format!("{moved_to}{FORK}"))
        }
        Found::Nothing | Found::Foreign | Found::Void | Found::Record { .. } => Ok(()),
    }
}

/// Whether a record shows that an image was forked.
pub fn is_forked(image: &Path) -> bool {
    forked_to(image).is_ok_and(|to| to.is_some())
}

/// The overlay in which the disk of an image continues, if it was forked.
///
/// # Errors
/// The host's.
pub(crate) fn forked_to(image: &Path) -> Result<Option<String>> {
    let found = found_beside(image)?;
    Ok(match found {
        Found::Record { stage: Stage::Moved, .. } => None,
        Found::Record { moved_to, .. } => Some(moved_to),
        _ => None,
    })
}

fn write_record(image: &Path, moved_to: &str) -> Result<()> {
    let record = record_of(image);
    let failed = |error| Error::host("cannot write", error).on(&record.to_string_lossy());
    let (if_exists, had_effect) = match find(&record).map_err(failed)? {
        Found::Nothing => (IfExists::Fail, false),
        Found::Void => (IfExists::Replace, false),
        Found::Record { .. } => (IfExists::Replace, true),
        Found::Foreign => {
            let what = "has the name of a record that the disk was moved, but is not one";
            return Err(Error::new(ErrorKind::InvalidInput, what)
                .on(&record.to_string_lossy())
                .hint("it is left alone: give it another name"));
        }
    };
    let mut part = record.clone().into_os_string();
    part.push(format!(".{}.new", std::process::id()));
    let part = PathBuf::from(part);
    // A killed process with the same number may have left it.
    let _ = remove_file(&part);
    let write = || {
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(0o600).open(&part)?;
        let identity = file_of(image).map(|file| format!("{FILE}{file}")).unwrap_or_default();
        file.write_all(&[MAGIC, moved_to.as_bytes(), identity.as_bytes(), b"\n"].concat())?;
        file.sync_all()
    };
    let made = write();
    let (is_made, is_missing) = (made.is_ok(), |e: io::Error| e.kind() == IoErrorKind::NotFound);
    let written = made.map_err(failed).and_then(|()| rename_durable(&part, &record, if_exists));
    if written.is_err() {
        // The caller reports the first failure. The rename may have happened, but not durably. Then
        // the record is removed, because the disk stays in the image. A record that replaced a
        // valid one stays.
        let is_part_gone = remove_file(&part).is_err_and(is_missing);
        if is_made && is_part_gone && !had_effect {
            let _ = remove_file(&record);
        }
    }
    written
}

/// Removes the record, if there is one: the disk is in this image again.
///
/// # Errors
/// The error names the record: host errors.
pub fn forget_moved(image: &Path) -> Result<()> {
    let record = record_of(image);
    let failed =
        |what| move |error| Error::host(what, error).on(&record_of(image).to_string_lossy());
    match find(&record).map_err(failed("cannot read"))? {
        Found::Nothing | Found::Foreign => Ok(()),
        Found::Record { .. } | Found::Void => {
            remove_file(&record).map_err(failed("cannot remove"))?;
            sync_folder(&record)
        }
    }
}

/// The canonical path, or `path` itself if no file is there.
fn whole(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// As [`check_not_moved`], for an image that is below the images in `names` in the chain of one
/// disk. A record that the disk was forked to one of these images is accepted.
///
/// # Errors
/// As there.
pub(crate) fn check_not_moved_but_to<'a>(
    image: &Path,
    mut names: impl Iterator<Item = &'a Path>,
) -> Result<()> {
    let is_it = |to: String| names.any(|name| to == whole(name).display().to_string());
    if forked_to(image)?.is_some_and(is_it) { Ok(()) } else { check_not_moved(image) }
}

/// Refuses an image whose disk was moved, or may have been.
///
/// # Errors
/// `InvalidInput`, with the disk's location and advice; host errors if the record cannot be read.
pub(crate) fn check_not_moved(image: &Path) -> Result<()> {
    let record = record_of(image);
    let found = find(&record).map_err(|error| {
        Error::host("cannot read", error)
            .on(&record.to_string_lossy())
            .hint("it may say that the image's disk was moved: let this user read it")
    })?;
    let Found::Record { moved_to, stage } = found else { return Ok(()) };
    let (record, moved_to) = (record.display(), moved_to.escape_debug());
    if stage != Stage::Moved {
        let what = format!("its disk was forked and goes on in '{moved_to}'");
        let error = Error::new(ErrorKind::InvalidInput, what).on(&image.to_string_lossy());
        return Err(error.hint(format!(
            "use '{moved_to}'; only where neither that nor another image over this one is needed, remove {record} and use this image"
        )));
    }
    let what = format!("its disk was moved to '{moved_to}', or a server ended while it was");
    Err(Error::new(ErrorKind::InvalidInput, what).on(&image.to_string_lossy()).hint(format!(
        "use '{moved_to}' if it opens; if it says that it is not complete, remove {record} and use this image"
    )))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

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
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        forget_moved(&image).unwrap();
        assert!(check_not_moved(&image).is_ok());
    }

    #[test]
    fn the_record_of_a_file_that_another_one_has_replaced_has_no_effect() {
        let folder = tempfile::tempdir().unwrap();
        let (image, over) = (folder.path().join("disk.img"), folder.path().join("over"));
        for record in [record_forked, record_committed] {
            fs::write(&image, "").unwrap();
            record(&image, &over).unwrap();
            fs::write(&image, "the same file").unwrap();
            assert!(check_not_moved(&image).is_err() && is_forked(&image));
            fs::remove_file(&image).unwrap();
            assert!(check_not_moved(&image).is_err(), "the file may come back");
            fs::write(&image, "").unwrap();
            assert!(check_not_moved(&image).is_ok() && !is_forked(&image));
        }
        record_moved(&image, "elsewhere").unwrap();
        assert!(check_not_moved(&image).is_err());
    }

    #[test]
    fn the_record_of_a_rollback_holds_as_long_as_the_overlay_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let (image, over) = (folder.path().join("disk.img"), folder.path().join("over"));
        for path in [&image, &over] {
            fs::write(path, "").unwrap();
        }
        record_forked(&image, &over).unwrap();
        record_rollback(&image, &over).unwrap();
        assert_eq!(forked_to(&image).unwrap().as_deref(), over.to_str());
        check_not_moved_but_to(&image, [&*over].into_iter()).unwrap();
        assert!(check_not_moved(&image).unwrap_err().to_string().contains("goes on in"));
        end_rollback(&image).unwrap();
        fs::rename(&over, folder.path().join("elsewhere")).unwrap();
        assert!(check_not_moved(&image).is_err(), "it was not dropped");
        record_rollback(&image, &over).unwrap();
        check_not_moved(&image).unwrap();
        assert!(!is_forked(&image));
        end_rollback(&image).unwrap();
        record_forked(&image, &over).unwrap();
        assert!(check_not_moved(&image).is_err(), "it was forked again");
        record_rollback(&image, &over).unwrap();
        forget_moved(&image).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_layer_that_a_commit_may_have_changed_is_no_longer_what_the_disk_was() {
        let folder = tempfile::tempdir().unwrap();
        let (image, over) = (folder.path().join("disk.img"), folder.path().join("over"));
        record_forked(&image, &over).unwrap();
        check_not_committed(&image).unwrap();
        record_committed(&image, &over).unwrap();
        assert!(check_not_committed(&image).is_err());
        check_not_moved_but_to(&image, [&*over].into_iter()).unwrap();
        assert!(check_not_moved(&image).is_err() && is_forked(&image));
    }

    #[test]
    fn a_file_has_one_record_whichever_link_leads_to_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::create_dir(path("images")).unwrap();
        fs::write(path("images/disk.img"), "").unwrap();
        symlink("images/disk.img", path("link.img")).unwrap();
        record_moved(&path("link.img"), "elsewhere").unwrap();
        assert!(path("images/disk.img.moved").exists());
        for name in ["images/disk.img", "link.img", "images/../link.img"] {
            assert!(check_not_moved(&path(name)).is_err(), "{name}");
        }
        forget_moved(&path("images/disk.img")).unwrap();
        assert!(check_not_moved(&path("link.img")).is_ok());
    }

    #[test]
    fn a_file_that_is_no_record_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let (image, record) =
            (folder.path().join("disk.img"), folder.path().join("disk.img.moved"));
        let other = folder.path().join("other");
        let text = [MAGIC, b"elsewhere\n"].concat();
        fs::write(&other, &text).unwrap();
        let pipe = || {
            let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU);
            rustix::fs::mknodat(rustix::fs::CWD, &record, kind, mode, 0).unwrap();
        };
        let sparse = || fs::File::create(&record).unwrap().set_len(1 << 40).unwrap();
        let folder = || fs::create_dir(&record).unwrap();
        let makers: [&dyn Fn(); 5] = [
            &|| fs::write(&record, "an image").unwrap(),
            &|| symlink(&other, &record).unwrap(),
            &pipe,
            &sparse,
            &folder,
        ];
        for make in makers {
            make();
            let before = fs::symlink_metadata(&record).unwrap();
            check_not_moved(&image).unwrap();
            forget_moved(&image).unwrap();
            let error = record_moved(&image, "elsewhere").unwrap_err().to_string();
            assert!(error.contains("left alone"), "{error}");
            let after = fs::symlink_metadata(&record).unwrap();
            assert_eq!((before.len(), before.file_type()), (after.len(), after.file_type()));
            let _ = fs::remove_file(&record).or_else(|_| fs::remove_dir(&record));
        }
        assert_eq!(fs::read(&other).unwrap(), text);
    }

    #[test]
    fn a_name_too_long_for_a_record_has_none() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("n".repeat(255));
        fs::write(&image, "").unwrap();
        check_not_moved(&image).unwrap();
        forget_moved(&image).unwrap();
        assert!(record_moved(&image, "elsewhere").is_err());
    }

    #[test]
    fn a_record_that_cannot_be_read_refuses_the_image() {
        let folder = tempfile::tempdir().unwrap();
        // Root can read every file, but no path leads through a regular file.
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let error = check_not_moved(&file.join("disk.img")).unwrap_err().to_string();
        assert!(error.contains("let this user read it"), "{error}");
    }
}
