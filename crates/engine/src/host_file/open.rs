//! Opens and makes host files, and probes them.

use std::convert::Infallible;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

use blockhouse_core::{Buffer, Error, ErrorKind, Offload, Result, Storage};
use rustix::fs::{Access, Mode, OFlags};
use rustix::io::Errno;

use super::device_writes::WriteCounter;
use super::new_file::NewFile;
use super::{HostFile, OpenFiles, Unsupported};
use crate::driver::file::{Caching, File, Medium};
use crate::driver::io_poll::{IoPoll, check_io_poll};
use crate::event_loop::local;
use crate::event_loop::wait_released::wait_until_released;
use crate::host_file::probe::{self, FileKind};
use crate::process::descriptors::DESCRIPTORS_HINT;
use crate::process::device_user::device_user;

/// Whether an open file may be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// Reads only.
    ReadOnly,
    /// Reads and writes.
    ReadWrite,
}

impl OpenMode {
    fn flags(self) -> OFlags {
        match self {
            Self::ReadOnly => OFlags::RDONLY,
            Self::ReadWrite => OFlags::RDWR,
        }
    }
}

/// Whether the host's page cache is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageCache {
    /// Reads and writes go through the page cache.
    Used,
    /// Reads and writes bypass it (`O_DIRECT`).
    Bypassed,
}

impl PageCache {
    fn caching(self) -> Caching {
        match self {
            Self::Used => Caching::PageCache,
            Self::Bypassed => Caching::Direct,
        }
    }
}

/// The files that are open a second time already.
#[derive(Default)]
struct Reopened {
    tail: Option<OwnedFd>,
    flushed: Option<OwnedFd>,
}

/// Bytes of the sample read that probes for `RWF_DSYNC`: one block of any device.
const SAMPLE: usize = 4096;

impl HostFile {
    /// Makes a new regular file of `size` bytes, all holes, and opens it for writing. Its mode is
    /// 0600 less the umask: only the owner may read guests' disks, and their memory in snapshots.
    ///
    /// # Errors
    /// The kernel's error: EEXIST for an existing file, which stays unchanged. If the size cannot
    /// be set, or the new file cannot be opened as requested, it is removed again.
    pub fn create(path: &Path, size: u64, cache: PageCache) -> Result<Self> {
        Self::create_as(path, size, cache, NewFile::default())
    }

    /// As [`create`](Self::create), with another mode, and hints for the file system. With
    /// [`NewFile::is_in_place`] an existing file is emptied instead, and stays on an error.
    ///
    /// # Errors
    /// The errors of [`create`](Self::create).
    pub fn create_as(path: &Path, size: u64, cache: PageCache, how: NewFile) -> Result<Self> {
        let failed = |what: &'static str, error: Errno| {
            Error::host(what, error.into()).on(&path.display().to_string())
        };
        // The file is made without O_DIRECT, because a file system without direct I/O creates the
        // file and then refuses to open it.
        let makes = if how.is_in_place { OFlags::TRUNC } else { OFlags::CREATE | OFlags::EXCL };
        let flags = makes | OFlags::WRONLY | OFlags::CLOEXEC;
        let others = if how.is_for_all { Mode::RGRP | Mode::ROTH } else { Mode::empty() };
        let rights = Mode::RUSR | Mode::WUSR | others;
        let made = rustix::fs::open(path, flags, rights).map_err(|error| {
            let failed = failed("cannot create", error);
            match error {
                Errno::EXIST => failed.hint("it is left alone: choose another name"),
                Errno::NOENT => failed.hint(missing(path)),
                Errno::ACCESS | Errno::PERM => failed.hint("check the permissions of its folder"),
                Errno::ROFS => failed.hint(READ_ONLY_FILE_SYSTEM),
                _ => failed,
            }
        })?;
        how.apply(made.as_fd(), path);
        let file = rustix::fs::ftruncate(&made, size)
            .map_err(|error| failed("cannot set the size of the new file", error))
            .and_then(|()| Self::open(path, OpenMode::ReadWrite, cache));
        if file.is_err() && !how.is_in_place {
            // The caller gets the first error.
            let _ = std::fs::remove_file(path);
        }
        file
    }

    /// Opens an existing file or block device.
    ///
    /// # Errors
    /// The kernel's error; [`ErrorKind::InvalidInput`] if it is neither a file nor a block device;
    /// [`ErrorKind::Locked`] for writing to a block device that is mounted, or in use by another
    /// writer.
    pub fn open(path: &Path, access: OpenMode, cache: PageCache) -> Result<Self> {
        Self::open_at(path, path, access, cache)
    }

    /// Opens the file at `place` with the name `path`.
    fn open_at(place: &Path, path: &Path, access: OpenMode, cache: PageCache) -> Result<Self> {
        let name = path.display().to_string();
        let failed = |error: Errno| Error::host("cannot open", error.into()).on(&name);
        let caching = cache.caching();
        let direct = match caching {
            Caching::PageCache => OFlags::empty(),
            Caching::Direct => OFlags::DIRECT,
        };
        let mode = access.flags();
        // NONBLOCK, because otherwise the open of a pipe for reading would wait for a writer.
        let flags = mode | direct | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let opened = match access {
            OpenMode::ReadOnly => rustix::fs::open(place, flags, Mode::empty()),
            OpenMode::ReadWrite => open_alone(place, flags),
        };
        let descriptor = opened.map_err(|error| {
            let found = std::fs::metadata(place);
            // The error that direct I/O returns for a folder or a pipe is misleading.
            if found.as_ref().is_ok_and(|found| !is_disk(found)) {
                return no_disk(&name);
            }
            if error == Errno::BUSY {
                return busy(&name, found.ok().and_then(|found| device_user(found.rdev())));
            }
            match advice(error, path, cache) {
                Some(hint) => failed(error).hint(hint),
                None => failed(error),
            }
        })?;
        set_file_flags(&descriptor, mode | direct).map_err(failed)?;
        let medium = probe::medium(&descriptor);
        let file = File::new(descriptor, medium, caching);
        if caching == Caching::Direct {
            tell_if_not_pollable(path);
        }
        Self::examine(file, path, mode, Reopened::default())
    }

    /// As [`open`](Self::open), for a file found before: `found` was opened with `O_PATH`. So
    /// exactly that file is opened, even if its path leads elsewhere by now. `path` is for
    /// messages, and for the open if /proc is not mounted.
    ///
    /// # Errors
    /// The errors of [`open`](Self::open); ESTALE if /proc is not mounted and the path leads to
    /// another file by now.
    pub fn open_found(
        found: BorrowedFd<'_>,
        path: &Path,
        access: OpenMode,
        cache: PageCache,
    ) -> Result<Self> {
        let link = format!("/proc/self/fd/{}", found.as_raw_fd());
        if rustix::fs::access(&link, Access::EXISTS).is_ok() {
            return Self::open_at(Path::new(&link), path, access, cache);
        }
        // A chroot or container without /proc.
        let file = Self::open(path, access, cache)?;
        let failed = |error: Errno| Error::host("cannot open", error.into()).on(&file.name);
        let wanted = rustix::fs::fstat(found).map_err(failed)?;
        let opened = rustix::fs::fstat(file.descriptor()).map_err(failed)?;
        if (wanted.st_dev, wanted.st_ino) == (opened.st_dev, opened.st_ino) {
            Ok(file)
        } else {
            Err(failed(Errno::STALE))
        }
    }

    /// As [`open`](Self::open), by the open files of another process that has opened the file with
    /// these options.
    ///
    /// The file's locks belong to both processes. Until [`own_locks`](Self::own_locks), a drop of
    /// the value does not release them.
    ///
    /// # Errors
    /// The kernel's error; ENOMEM if descriptors run out.
    pub fn adopt(
        path: &Path,
        files: OpenFiles<OwnedFd>,
        access: OpenMode,
        cache: PageCache,
    ) -> Result<Self> {
        let OpenFiles { file, tail, flushed } = files;
        let medium = probe::medium(&file);
        let file = File::new(file, medium, cache.caching());
        file.set_releases_locks(false);
        Self::examine(file, path, access.flags(), Reopened { tail, flushed })
    }

    /// Another value for the same open files, opened with the same `access`; messages name it
    /// `path`. The locks belong to this value until they are [moved](Self::move_locks_to).
    ///
    /// Before the new value replaces this one, the caller flushes this one: if a sync whose future
    /// was dropped failed, only the next flush of this value reports that.
    ///
    /// # Errors
    /// The kernel's error; ENOMEM if descriptors run out.
    pub fn share(&self, path: &Path, access: OpenMode) -> Result<Self> {
        let OpenFiles { file, tail, flushed } = self.open_files();
        let copy = |file: BorrowedFd<'_>| {
            let copied = file.try_clone_to_owned();
            copied.map_err(|error| Error::host("cannot open it once more", error).on(&self.name))
        };
        let files = OpenFiles {
            file: copy(file)?,
            tail: tail.map(copy).transpose()?,
            flushed: flushed.map(copy).transpose()?,
        };
        let cache = match self.file.caching {
            Caching::Direct => PageCache::Bypassed,
            Caching::PageCache => PageCache::Used,
        };
        Self::adopt(path, files, access, cache)
    }

    /// Extends a file that ends inside of a block to the block's end. Without the extension a block
    /// is at least a page, because the last partial block is written through the page cache. The
    /// caller calls this before the first read or write. A file that another process may still use
    /// stays unchanged.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn fill_last_block(&mut self) -> Result<()> {
        let failed = |error| Error::host("cannot make it longer", error).on(&self.name);
        let alignment = probe::alignment(&self.file, self.kind).map_err(failed)?;
        let whole = self.size.get_mut().next_multiple_of(alignment.offset.into());
        if *self.size.get_mut() == whole || !self.file.releases_locks() {
            return Ok(());
        }
        rustix::fs::ftruncate(&*self.file, whole).map_err(|error| failed(error.into()))?;
        *self.size.get_mut() = whole;
        self.alignment = alignment;
        Ok(())
    }

    /// Whether the file ends inside of a block, so that [`fill_last_block`](Self::fill_last_block)
    /// changes it.
    pub fn has_partial_block(&self) -> bool {
        !self.size().is_multiple_of(u64::from(self.alignment.offset))
    }

    fn examine(file: File, path: &Path, access: OFlags, reopened: Reopened) -> Result<Self> {
        let name = path.display().to_string();
        let failed = |error: std::io::Error| Error::host("cannot examine", error).on(&name);
        let kind = probe::kind(&file).map_err(failed)?.ok_or_else(|| no_disk(&name))?;
        let size = probe::size(&file).map_err(failed)?;
        let mut alignment = probe::alignment(&file, kind).map_err(|error| {
            failed(error).hint("it cannot do direct I/O: try --cache writeback")
        })?;
        if access == OFlags::RDWR && !size.is_multiple_of(u64::from(alignment.offset)) {
            // A block is at least a page, so that no other block shares a page with the last
            // partial block, which is written through the page cache.
            let page = rustix::param::page_size() as u32;
            alignment.offset = alignment.offset.max(page);
        }
        let device = probe::device(&file, kind).map_err(failed)?;
        let offload_block = probe::offload_block(&file, kind).map_err(failed)?;
        let tail = match kind {
            FileKind::Regular if alignment.offset > 1 => {
                let tail = match reopened.tail {
                    Some(descriptor) => Ok(file.through_page_cache(descriptor)),
                    None => file.reopen_cached(access, path),
                };
                let tail = tail.map_err(|error| {
                    Error::host("cannot open it a second time", error.into()).on(&name)
                })?;
                Some(Arc::new(tail))
            }
            _ => None,
        };
        let probed_fua = probe::fua(&file, &Buffer::new(SAMPLE).lend());
        let unsupported = Unsupported {
            punch_hole: (device.write_zeroes == Offload::Unavailable).into(),
            zero_range: (device.write_zeroes == Offload::Unavailable).into(),
            set_aside: false.into(),
            discard: (device.discard == Offload::Unavailable).into(),
            extend: (kind == FileKind::BlockDevice).into(),
            prepare_zeroes: (device.prepare_zeroes == Offload::Unavailable).into(),
        };
        let (file, size) = (Arc::new(file), size.into());
        let flushed = match &tail {
            Some(tail) => Arc::clone(tail),
            None => open_for_flushes(&file, access, path, reopened.flushed),
        };
        let probe::Device { fua_cost, write_cache, .. } = device;
        let status = rustix::fs::fstat(&*file).map_err(|error| failed(error.into()))?;
        let writes = match kind {
            FileKind::BlockDevice => WriteCounter::of(status.st_rdev),
            FileKind::Regular => None,
        };
        Ok(Self {
            file,
            tail,
            flushed,
            name,
            kind,
            size,
            alignment,
            offload_block,
            probed_fua,
            fua_cost,
            write_cache,
            unsupported,
            writes,
            file_system: status.st_dev,
        })
    }
}

/// Opens for writing. With `O_EXCL` the kernel refuses a block device that is mounted, is part of
/// another device, or was opened with `O_EXCL` by another program, through any device node. For
/// files `O_EXCL` has no effect without `O_CREAT`.
fn open_alone(place: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let mut opened = Err(Errno::BUSY);
    // A killed process holds its devices until its I/O has ended.
    let _ = wait_until_released(|| {
        opened = rustix::fs::open(place, flags | OFlags::EXCL, Mode::empty());
        let is_busy = matches!(opened, Err(Errno::BUSY));
        let device = || std::fs::metadata(place).map_or(0, |found| found.rdev());
        Ok::<_, Infallible>(!is_busy || device_user(device()).is_some())
    });
    opened
}

fn busy(name: &str, user: Option<String>) -> Error {
    let user = user.unwrap_or_else(|| {
        "another program has it open exclusively, or it is mounted elsewhere".to_owned()
    });
    Error::new(ErrorKind::Locked, format!("the device is in use: {user}"))
        .on(name)
        .hint("unmount it, or stop its user, first; two writers would destroy each other's data")
}

/// The open file that is flushed. If the page cache may hold written data, this is a second open
/// file, which gets no durable writes. If the file cannot be opened again, the same open file
/// serves for both.
fn open_for_flushes(
    file: &Arc<File>,
    access: OFlags,
    path: &Path,
    reopened: Option<OwnedFd>,
) -> Arc<File> {
    if let Some(descriptor) = reopened {
        return Arc::new(file.through_page_cache(descriptor));
    }
    let may_hold_writes = file.caching == Caching::PageCache
        && file.medium != Medium::Memory
        && access == OFlags::RDWR;
    let opened = may_hold_writes.then(|| file.reopen_cached(access, path));
    opened.and_then(|opened| opened.ok()).map_or_else(|| Arc::clone(file), Arc::new)
}

/// Sets the flags for reads and writes. `O_NONBLOCK` is cleared, because io_uring would fail
/// requests rather than wait.
fn set_file_flags(descriptor: &OwnedFd, flags: OFlags) -> rustix::io::Result<()> {
    // NOATIME, because an update of the access time is work at every read. Only the file's owner
    // may set it.
    match rustix::fs::fcntl_setfl(descriptor, flags | OFlags::NOATIME) {
        Err(Errno::PERM) => rustix::fs::fcntl_setfl(descriptor, flags),
        outcome => outcome,
    }
}

/// Warns if the loop polls for completions but cannot do so for this file.
fn tell_if_not_pollable(path: &Path) {
    let io_poll = local::try_current(|local| local.io_poll.get());
    if io_poll == Some(IoPoll::On)
        && let Err(error) = check_io_poll(path)
    {
        tracing::warn!("{error}");
    }
}

fn is_disk(found: &std::fs::Metadata) -> bool {
    found.is_file() || found.file_type().is_block_device()
}

fn no_disk(name: &str) -> Error {
    let what = "this is a directory, pipe or device, and no disk";
    let error = Error::new(ErrorKind::InvalidInput, what).on(name);
    error.hint("give the path of a disk image or a block device")
}

const READ_ONLY_FILE_SYSTEM: &str = "its file system is mounted for reading only";

/// The hint about a file that cannot be opened, for any purpose.
fn advice(error: Errno, path: &Path, cache: PageCache) -> Option<String> {
    Some(match error {
        Errno::NOENT => missing(path),
        Errno::ROFS => READ_ONLY_FILE_SYSTEM.to_owned(),
        Errno::ACCESS | Errno::PERM => "check its permissions".to_owned(),
        Errno::MFILE | Errno::NFILE => DESCRIPTORS_HINT.to_owned(),
        Errno::INVAL if cache == PageCache::Bypassed => {
            "its file system has no direct I/O: try --cache writeback".to_owned()
        }
        _ => return None,
    })
}

/// Whether the path begins as `http://` does.
fn is_url(path: &Path) -> bool {
    let begin = path.to_str().and_then(|text| text.split_once("://"));
    begin.is_some_and(|(scheme, _)| {
        !scheme.is_empty() && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric())
    })
}

/// The hint about a path that does not exist.
fn missing(path: &Path) -> String {
    if is_url(path) {
        return "images are not opened by their URL: download it first, or serve it by NBD, as \
                'nbdkit curl URL' does"
            .to_owned();
    }
    let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    match folder {
        Some(folder) if !folder.exists() => {
            format!("there is no folder '{}': check the path", folder.display())
        }
        _ => "check the path".to_owned(),
    }
}
