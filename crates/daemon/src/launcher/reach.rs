//! Checks whether a server could have written a program, under any path, from the places where it
//! can write.
//!
//! A folder has a path for each mount that leads to it. So places are compared by device and inode,
//! and by their locations in their file systems (`/proc/self/mountinfo`), not by path names.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use rustix::fs::{Access, AtFlags, CWD, StatxFlags, accessat, stat, statx};

use super::protocol::{ToldReach, Writable};
use crate::sandbox::Reach;

/// The places where a server can write, as the rules describe them. Paths that do not exist are
/// left out, because they cannot be written.
pub(super) fn told(reach: &Reach) -> ToldReach {
    let writable = |path: &PathBuf| {
        let identity = identity(path)?;
        Some(Writable { path: path.as_os_str().as_bytes().to_vec(), identity })
    };
    match reach {
        Reach::User => ToldReach::User,
        Reach::Below(paths) => ToldReach::Below(paths.iter().filter_map(writable).collect()),
        Reach::Anywhere => ToldReach::Anywhere,
    }
}

/// The canonical path of a program.
///
/// # Errors
/// The program is missing, the server can write to it, or it is unknown whether the server can.
pub(super) fn check(program: &Path, reach: &ToldReach) -> Result<PathBuf> {
    let found = program.canonicalize()?;
    let folders = match reach {
        ToldReach::Anywhere => return Ok(found),
        ToldReach::User => {
            if let Some(part) = found.ancestors().find(|part| may_write(part)) {
                bail!(
                    "this kernel does not keep the server from writing {}, so the program may be a stranger's; give it \
                     and its folders to another user than the server's",
                    part.display()
                );
            }
            return Ok(found);
        }
        ToldReach::Below(folders) => folders,
    };
    let mounts = Mounts::read().context("/proc/self/mountinfo")?;
    let is_above = |folder: &&Writable| {
        let is_it = |part: &Path| identity(part) == Some(folder.identity);
        found.ancestors().any(is_it) || mounts.reaches(&path_of(&folder.path), &found)
    };
    match folders.iter().find(is_above) {
        None => Ok(found),
        Some(folder) => bail!(
            "the server can write below {}, so the program may be a stranger's; install it elsewhere",
            path_of(&folder.path).display()
        ),
    }
}

/// Parses a mount table and looks a path up in it, for fuzz targets. Returns whether `/opt/a b/c`
/// is in a mount and can be changed from below `/opt`.
pub fn read_mounts(text: &[u8]) -> bool {
    Mounts::parse(text).is_some_and(|mounts| {
        let place = |path| mounts.place_in(Path::new(path), None);
        place("/opt/a b/c")
            .is_some_and(|file| mounts.are_below(Path::new("/opt"), place("/opt"), &file))
    })
}

pub(super) fn path_of(bytes: &[u8]) -> PathBuf {
    PathBuf::from(OsString::from_vec(bytes.to_vec()))
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    stat(path).ok().map(|status| (status.st_dev, status.st_ino))
}

/// Whether this process's user may write a file, or owns it and so could give itself the right.
fn may_write(path: &Path) -> bool {
    let is_owner = |owner| owner == rustix::process::geteuid().as_raw();
    stat(path).map_or(true, |status| is_owner(status.st_uid))
        || accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS).is_ok()
}

/// The mount table.
struct Mounts(Vec<Mount>);

/// A mount.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    id: u64,
    /// The file system.
    device: String,
    /// The folder of the file system that is mounted.
    root: PathBuf,
    /// The mount point.
    point: PathBuf,
}

impl Mounts {
    fn read() -> Result<Self> {
        Self::parse(&std::fs::read("/proc/self/mountinfo")?).context("a line makes no sense")
    }

    /// Reads lines like `36 35 98:0 /folder /mnt rw - ext4 /dev/sda rw` (proc_pid_mountinfo(5)).
    fn parse(text: &[u8]) -> Option<Self> {
        let lines = text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        let mount = |line: &[u8]| {
            let mut fields = line.split(|byte| *byte == b' ');
            let id = str::from_utf8(fields.next()?).ok()?.parse().ok()?;
            let device = String::from_utf8(fields.nth(1)?.to_vec()).ok()?;
            let (root, point) = (unescaped(fields.next()?), unescaped(fields.next()?));
            Some(Mount { id, device, root, point })
        };
        lines.map(mount).collect::<Option<_>>().map(Self)
    }

    /// The file system that has a canonical path, and the location in that file system.
    fn place(&self, path: &Path) -> Option<(&str, PathBuf)> {
        let id = statx(CWD, path, AtFlags::empty(), StatxFlags::MNT_ID).ok();
        let id = id.filter(|found| found.stx_mask & StatxFlags::MNT_ID.bits() != 0);
        self.place_in(path, id.map(|found| found.stx_mnt_id))
    }

    /// As [`place`](Self::place), in the mount with this id. If the id is unknown, the mount with
    /// the longest mount point is used; if several mounts have that mount point, the last one.
    fn place_in(&self, path: &Path, id: Option<u64>) -> Option<(&str, PathBuf)> {
        let mut above = self.0.iter().filter(|mount| path.starts_with(&mount.point));
        let mount = match id {
            Some(id) => above.rfind(|mount| mount.id == id),
            None => above.max_by_key(|mount| mount.point.components().count()),
        }?;
        let rest = path.strip_prefix(&mount.point).ok()?;
        Some((&mount.device, mount.root.join(rest)))
    }

    /// Whether a process that can write below `folder` can change the file at `path`: the file is
    /// below `folder` in its file system, or in a file system that is mounted below `folder`. Both
    /// paths are canonical. Also true if the location of the file or of the folder is unknown.
    fn reaches(&self, folder: &Path, path: &Path) -> bool {
        let Some(place) = self.place(path) else { return true };
        self.are_below(folder, self.place(folder), &place)
    }

    /// As [`reaches`](Self::reaches), for the locations of the folder and of the file.
    fn are_below(
        &self,
        folder: &Path,
        own: Option<(&str, PathBuf)>,
        (device, place): &(&str, PathBuf),
    ) -> bool {
        let is_above = |one: &str, root: &Path| one == *device && place.starts_with(root);
        let mut mounted = self.0.iter().filter(|mount| mount.point.starts_with(folder));
        own.is_none_or(|(device, root)| is_above(device, &root))
            || mounted.any(|mount| is_above(&mount.device, &mount.root))
    }
}

/// Decodes a field, in which spaces and similar bytes are a backslash and three octal digits.
fn unescaped(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, after @ ..] = rest {
        let digits = after.get(..3).and_then(|digits| str::from_utf8(digits).ok());
        let octal = digits.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        let (byte, after) = match octal.filter(|_| *first == b'\\') {
            Some(byte) => (byte, &after[3..]),
            None => (*first, after),
        };
        bytes.push(byte);
        rest = after;
    }
    PathBuf::from(OsString::from_vec(bytes))
}

/// Whether programs can be located. The mount of `/` is not listed in a folder that was entered by
/// chroot(2) and is no mount point: then a server may be able to write anywhere. Says so.
#[cfg(test)]
pub(super) fn is_root_listed() -> bool {
    let is_listed = Mounts::read().is_ok_and(|mounts| mounts.place(Path::new("/")).is_some());
    if !is_listed {
        eprintln!("SKIPPED: the mount of / is not listed");
    }
    is_listed
}

#[cfg(test)]
mod tests {
    use super::*;

    const INFO: &[u8] = b"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
        30 22 8:1 /srv/images/bin /opt/a\\040b rw shared:1 - ext4 /dev/sda1 rw\n\
        31 22 8:1 /usr/local /srv/images/local rw - ext4 /dev/sda1 rw\n\
        32 22 0:40 / /tmp rw - tmpfs tmpfs rw\n\
        33 22 0:41 / /tmp rw - tmpfs tmpfs rw\n";

    #[test]
    fn a_place_is_known_by_its_file_system_whatever_mount_leads_there() {
        let mounts = Mounts::parse(INFO).expect("lines");
        let place = |path: &str, id| {
            let found = mounts.place_in(Path::new(path), id);
            found.map(|(device, place)| format!("{device} {}", place.display()))
        };
        assert_eq!(place("/usr/bin/x", None).as_deref(), Some("8:1 /usr/bin/x"));
        assert_eq!(place("/opt/a b/x", None).as_deref(), Some("8:1 /srv/images/bin/x"));
        assert_eq!(place("/tmp/x", None).as_deref(), Some("0:41 /x"));
        assert_eq!(place("/tmp/x", Some(32)).as_deref(), Some("0:40 /x"));
        assert_eq!(place("/tmp/x", Some(99)), None);
        assert!(Mounts::parse(b"x y\n").is_none() && Mounts::parse(b"1 2\n").is_none());
    }

    #[test]
    fn what_is_bound_into_or_out_of_a_folder_is_reached() {
        let mut mounts = Mounts::parse(INFO).expect("lines");
        let reaches = |mounts: &Mounts, path: &str| {
            let folder = Path::new("/srv/images");
            let place = mounts.place_in(Path::new(path), None).expect("it is in one");
            mounts.are_below(folder, mounts.place_in(folder, None), &place)
        };
        assert!(reaches(&mounts, "/opt/a b/blockhouse"));
        assert!(reaches(&mounts, "/usr/local/bin/blockhouse"));
        assert!(!reaches(&mounts, "/usr/bin/blockhouse"));
        let place = mounts.place_in(Path::new("/usr/bin/blockhouse"), None).expect("it is in one");
        assert!(mounts.are_below(Path::new("/srv/images"), None, &place), "it may be anywhere");
        mounts.0.retain(|mount| mount.id != 31);
        assert!(!reaches(&mounts, "/usr/local/bin/blockhouse"));
    }

    #[test]
    fn links_and_folders_are_seen_through() {
        if !is_root_listed() {
            return;
        }
        let scratch = tempfile::tempdir().expect("a folder");
        let path = |name: &str| scratch.path().join(name);
        for folder in ["images", "images/bin", "programs"] {
            std::fs::create_dir(path(folder)).expect("a folder");
        }
        for file in ["images/bin/blockhouse", "programs/blockhouse"] {
            std::fs::write(path(file), "x").expect("a file");
        }
        std::os::unix::fs::symlink(path("images/bin"), path("programs/link")).expect("a link");
        let below = told(&Reach::Below(vec![path("images").canonicalize().expect("there")]));
        for (program, is_refused) in [
            ("images/bin/blockhouse", true),
            ("programs/link/blockhouse", true),
            ("programs/../images/bin/blockhouse", true),
            ("programs/blockhouse", false),
        ] {
            assert_eq!(check(&path(program), &below).is_err(), is_refused, "{program}");
        }
        assert!(check(&path("programs/blockhouse"), &ToldReach::User).is_err(), "it is ours");
        assert!(check(&path("programs/blockhouse"), &ToldReach::Anywhere).is_ok());
        assert!(check(&path("none"), &ToldReach::Anywhere).is_err());
    }
}
