//! Image locks: the same bytes that QEMU locks, so that QEMU and this program exclude each other.
//!
//! A program that uses permission n holds byte 100 + n. A program that does not let others use
//! permission n holds byte 200 + n (QEMU, `block/file-posix.c`). The locks are
//! open-file-description locks, which end when the file is closed. A program first takes its own
//! bytes, then looks for those of others. So if two programs start at the same moment, at least one
//! sees the other.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;

use blockhouse_core::{Error, ErrorKind, Result, Storage};
use blockhouse_disk::Access;
use blockhouse_engine::{
    HostFile, OpenMode, PageCache, is_byte_locked, lock_byte_shared, unlock_byte,
    wait_until_released,
};
use rustix::fs::{AtFlags, StatxFlags, statx};

use crate::same_bytes::check_alone;

const USED: u64 = 100;
const REFUSED: u64 = 200;

/// A program's use of an image, with QEMU's number.
#[derive(Clone, Copy)]
enum Permission {
    Read = 0,
    Write = 1,
    Resize = 3,
}

/// The permissions that no opener lets others use: no other program may change the image, even
/// while it is open only for reading.
const REFUSED_BY_ALL: [Permission; 2] = [Permission::Write, Permission::Resize];

impl Permission {
    fn used(self) -> u64 {
        USED + self as u64
    }

    fn refused(self) -> u64 {
        REFUSED + self as u64
    }

    fn verb(self) -> &'static str {
        match self {
            Self::Read => "reading it",
            Self::Write => "writing to it",
            Self::Resize => "resizing it",
        }
    }
}

/// Whether an image is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Locked {
    /// The image is locked as long as it is open.
    Yes,
    /// The image's file system has no locks, or no lock was requested.
    No,
}

/// Locks `file` for as long as it is open: a writer excludes all others, readers exclude writers.
/// The locks of a file that another process hands over stay unchanged.
///
/// A file system without such locks leaves the image unlocked, with a warning in the log.
///
/// # Errors
/// [`ErrorKind::Locked`] with the holder's process, if it can be found; the host's errors.
pub(crate) fn lock(file: &HostFile, access: Access) -> Result<Locked> {
    let locked = lock_bytes(file, access)?;
    // The process that hands a file over has checked this already.
    if !file.shares_locks() {
        check_alone(file, access, |below, path| check_unlocked(below, access, file.name(), path))?;
    }
    Ok(locked)
}

/// The permissions that an opener uses.
fn used_by(access: Access) -> &'static [Permission] {
    match access {
        Access::ReadOnly => &[Permission::Read],
        Access::ReadWrite => &[Permission::Read, Permission::Write, Permission::Resize],
    }
}

/// Takes the bytes of a lock, and does not look for those of others, so this never waits. Suffices
/// for a lock that replaces another one of this process.
///
/// # Errors
/// The host's errors.
pub(crate) fn take_bytes(file: &HostFile, access: Access) -> Result<Locked> {
    let descriptor = file.descriptor();
    let failed = |error| Error::host("cannot lock", error).on(file.name());
    let used = used_by(access).iter().map(|permission| permission.used());
    for byte in used.chain(REFUSED_BY_ALL.map(Permission::refused)) {
        match lock_byte_shared(descriptor, byte) {
            Ok(()) => {}
            Err(error) if is_without_locks(&error) => {
                tracing::warn!("{} is not locked: its file system has no locks", file.name());
                return Ok(Locked::No);
            }
            Err(error) => return Err(failed(error)),
        }
    }
    Ok(Locked::Yes)
}

fn lock_bytes(file: &HostFile, access: Access) -> Result<Locked> {
    let locked = take_bytes(file, access)?;
    // The process that hands the file over holds these locks already, so no other program uses the
    // image. A program that tries to open the image holds some bytes for a moment, until it finds
    // these locks. That program must not count as a holder.
    if locked == Locked::No || file.shares_locks() {
        return Ok(locked);
    }
    for permission in REFUSED_BY_ALL {
        wait_for_free(file, permission.used(), permission.verb())?;
    }
    for permission in used_by(access) {
        let refuses = format!("keeping others from {}", permission.verb());
        wait_for_free(file, permission.refused(), &refuses)?;
    }
    Ok(Locked::Yes)
}

/// As [`lock`] for writing, and releases the locks of `reader`, another opening of the same file by
/// this process. Meanwhile no other program can begin to write. If this fails, `reader` has its
/// locks again.
///
/// # Errors
/// As [`lock`].
pub(crate) fn lock_in_place_of(file: &HostFile, reader: &HostFile) -> Result<()> {
    let refused = REFUSED_BY_ALL.map(Permission::refused);
    let take = |file: &HostFile| {
        refused.iter().try_for_each(|byte| lock_byte_shared(file.descriptor(), *byte))
    };
    // An error is ignored, because `lock` handles it below.
    let _ = take(file);
    reader.release_locks();
    let locked = lock(file, Access::ReadWrite);
    if locked.is_err() {
        let _ = take(reader);
        file.release_locks();
        // Only the first error is reported.
        let _ = take_bytes(reader, Access::ReadOnly);
    }
    locked.map(drop)
}

/// Downgrades the lock of a writer to that of a reader. Meanwhile no other program can begin to
/// write.
pub(crate) fn become_reader(file: &HostFile) {
    for permission in [Permission::Write, Permission::Resize] {
        if let Err(error) = unlock_byte(file.descriptor(), permission.used())
            && !is_without_locks(&error)
        {
            tracing::warn!("{}: cannot let others read it: {error}", file.name());
        }
    }
}

/// Whether another opening of the file holds the lock of a writer; also true if this cannot be
/// determined.
pub(crate) fn is_being_written(file: &HostFile) -> bool {
    is_byte_locked(file.descriptor(), Permission::Write.used()).unwrap_or(true)
}

/// Opens a file of any content for writing, and locks it until the returned file is dropped: until
/// then no other program uses it as an image.
///
/// # Errors
/// [`ErrorKind::Locked`] if another program uses the file; errors of opening it.
pub fn lock_for_writing(path: &Path) -> Result<HostFile> {
    let file = HostFile::open(path, OpenMode::ReadWrite, PageCache::Used)?;
    lock(&file, Access::ReadWrite)?;
    Ok(file)
}

/// Fails if a program uses `file` in a way that excludes this access. `file` has the same bytes as
/// the device `name`. No lock is acquired.
///
/// # Errors
/// [`ErrorKind::Locked`] with both names and the holder.
fn check_unlocked(file: BorrowedFd<'_>, access: Access, name: &str, path: &str) -> Result<()> {
    let used = [Permission::Write, Permission::Resize].map(Permission::used);
    let refused = used_by(access).iter().map(|permission| permission.refused());
    for byte in used.into_iter().chain(refused) {
        // A file system without locks has no holders.
        let is_free = wait_until_released(|| is_byte_locked(file, byte).map(|locked| !locked));
        if !is_free.unwrap_or(true) {
            let holder = match lock_owner(file, byte) {
                Some(LockOwner::Other(name)) => name,
                Some(LockOwner::Ourselves) => "this command".to_owned(),
                None => "another program".to_owned(),
            };
            let what = format!("has the same bytes as {path}, which {holder} has open");
            return Err(Error::new(ErrorKind::Locked, what)
                .on(name)
                .hint("name each image once, and stop that program first"));
        }
    }
    Ok(())
}

/// Succeeds when no program holds the byte. Waits a moment if no other process is found as the
/// holder: the holder may have ended, but the kernel has not released its locks yet.
fn wait_for_free(file: &HostFile, byte: u64, doing: &str) -> Result<()> {
    let mut ours = false;
    let is_free = wait_until_released(|| {
        let locked = is_byte_locked(file.descriptor(), byte);
        if !locked.map_err(|error| Error::host("cannot lock", error).on(file.name()))? {
            return Ok(true);
        }
        ours = match lock_owner(file.descriptor(), byte) {
            Some(LockOwner::Other(name)) => return Err(held(file, &name, doing)),
            Some(LockOwner::Ourselves) => true,
            None => false,
        };
        Ok(false)
    })?;
    match (is_free, ours) {
        (true, _) => Ok(()),
        (false, true) => Err(held_by_ourselves(file)),
        (false, false) => Err(held(file, "another program", doing)),
    }
}

fn is_without_locks(error: &io::Error) -> bool {
    // EINVAL, ENOSYS, ENOLCK, EOPNOTSUPP.
    error.raw_os_error().is_some_and(|code| [22, 38, 37, 95].contains(&code))
}

fn held(file: &HostFile, who: &str, doing: &str) -> Error {
    Error::new(ErrorKind::Locked, format!("the image is locked: {who} is {doing}"))
        .on(file.name())
        .hint("stop that program first; a copy made while it runs may be damaged")
}

fn held_by_ourselves(file: &HostFile) -> Error {
    let what =
        "the image is locked: this command has it open already, as another image or behind one";
    Error::new(ErrorKind::Locked, what)
        .on(file.name())
        .hint("name each image once, and nothing as a target that another image needs")
}

/// The holder of a lock on a byte.
enum LockOwner {
    /// Another process, described for a message.
    Other(String),
    /// This process, by a descriptor other than the caller's.
    Ourselves,
}

/// The holder of a lock on a byte, as far as this process may see it in /proc.
fn lock_owner(file: BorrowedFd<'_>, byte: u64) -> Option<LockOwner> {
    let status = rustix::fs::fstat(file).ok()?;
    let (major, minor) = mounted_device(file)
        .unwrap_or_else(|| (rustix::fs::major(status.st_dev), rustix::fs::minor(status.st_dev)));
    let inode = format!("{major:02x}:{minor:02x}:{}", status.st_ino);
    let own = std::process::id().to_string();
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let mut ids = processes.filter_map(|entry| entry.file_name().into_string().ok());
    let foreign = |id: &String| {
        id.bytes().all(|c| c.is_ascii_digit()) && *id != own && holds(id, None, &inode, byte)
    };
    let describe = |id: &str| {
        let name = fs::read_to_string(Path::new("/proc").join(id).join("comm")).ok();
        format!("{} (process {id})", name.as_deref().map_or("a program", str::trim))
    };
    match ids.find(foreign) {
        Some(id) => Some(LockOwner::Other(describe(&id))),
        None => holds(&own, Some(file), &inode, byte).then_some(LockOwner::Ourselves),
    }
}

/// The major and minor number of the device of a file's mount, by which the kernel names locks.
/// `stat` has another device for a file of btrfs, one for each subvolume. `None` if this process
/// does not see the mount.
fn mounted_device(file: BorrowedFd<'_>) -> Option<(u32, u32)> {
    let found = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID).ok()?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    device_of_mount(&mounts, &found.stx_mnt_id.to_string())
}

/// The device of the mount with this id in the text of `/proc/self/mountinfo` (see `proc(5)`).
fn device_of_mount(mounts: &str, id: &str) -> Option<(u32, u32)> {
    let mut lines = mounts.lines().map(str::split_whitespace);
    let device = lines.find_map(|mut words| (words.next() == Some(id)).then(|| words.nth(1))?)?;
    let (major, minor) = device.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Whether a process holds a lock on the byte, by another descriptor than `except`. See `proc(5)`,
/// `/proc/PID/fdinfo`: `lock: 1: OFDLCK ADVISORY READ -1 fe:00:1234 100 101`.
fn holds(process: &str, except: Option<BorrowedFd<'_>>, inode: &str, byte: u64) -> bool {
    let Ok(descriptors) = fs::read_dir(format!("/proc/{process}/fdinfo")) else {
        return false;
    };
    let except = except.map(|file| file.as_raw_fd().to_string());
    let others = descriptors
        .flatten()
        .filter(|entry| except.as_deref().is_none_or(|number| entry.file_name() != number));
    let mut lines = others.filter_map(|entry| fs::read_to_string(entry.path()).ok());
    lines.any(|text| text.lines().any(|line| covers(line, inode, byte)))
}

fn covers(line: &str, inode: &str, byte: u64) -> bool {
    let Some(lock) = line.strip_prefix("lock:") else { return false };
    let words: Vec<&str> = lock.split_whitespace().collect();
    let [.., place, start, end] = words[..] else { return false };
    let start = start.parse().unwrap_or(u64::MAX);
    // "EOF" for a lock without an end.
    let end = end.parse().unwrap_or(u64::MAX);
    place == inode && (start..=end).contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_has_the_device_of_its_line() {
        let mounts =
            "22 1 254:0 / / rw - ext4 /dev/vda rw\n31 22 0:45 /sub /srv rw - btrfs /dev/vdb rw\n";
        assert_eq!(device_of_mount(mounts, "31"), Some((0, 45)));
        assert_eq!(device_of_mount(mounts, "2"), None);
    }

    #[test]
    fn a_lock_line_covers_its_bytes() {
        let line = "lock:\t1: OFDLCK ADVISORY  READ -1 fe:00:10010748 100 101";
        assert!(covers(line, "fe:00:10010748", 101));
        assert!(!covers(line, "fe:00:10010748", 102));
        assert!(!covers(line, "fe:00:1001074", 101));
        assert!(covers("lock:\t1: POSIX  ADVISORY  WRITE 77 00:1d:9 0 EOF", "00:1d:9", 203));
        assert!(!covers("pos:\t0", "00:1d:9", 0));
    }
}
