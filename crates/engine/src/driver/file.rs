//! An open file as the engines see it.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::driver::byte_lock;
use crate::driver::detached_syncs::DetachedSyncs;
use crate::driver::fixed_files::FileId;
use crate::driver::io_poll::Pollable;
use crate::driver::registrations::Registrations;

/// An open file and the properties by which an engine chooses its method.
pub(crate) struct File {
    descriptor: OwnedFd,
    pub(crate) medium: Medium,
    pub(crate) caching: Caching,
    /// Shared with each open that [`through_page_cache`](Self::through_page_cache) adds.
    pub(crate) detached_syncs: Arc<DetachedSyncs>,
    /// The rings in which the file has a slot.
    pub(crate) registrations: Registrations<FileId>,
    /// The completions that can be polled for.
    pub(crate) pollable: Pollable,
    /// Whether the drop releases the file's locks. It does not if they also belong to another
    /// process.
    releases_locks: AtomicBool,
}

/// The location of a file's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Medium {
    /// In memory (tmpfs). An operation is a copy and never waits for a device, so a synchronous
    /// call is cheaper than any asynchronous method.
    Memory,
    /// In a file system on a device: an operation may take long.
    FileSystem,
    /// The device itself: an operation may take long.
    Device,
}

/// Whether I/O goes through the host's page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Caching {
    /// `O_DIRECT`.
    Direct,
    PageCache,
}

impl File {
    pub(crate) fn new(descriptor: OwnedFd, medium: Medium, caching: Caching) -> Self {
        let (detached_syncs, registrations) = (Arc::default(), Registrations::new(FileId::take()));
        let pollable = match caching {
            Caching::Direct => Pollable::find(&descriptor),
            Caching::PageCache => Pollable::none(),
        };
        let releases_locks = AtomicBool::new(true);
        Self {
            descriptor,
            medium,
            caching,
            detached_syncs,
            registrations,
            pollable,
            releases_locks,
        }
    }

    /// Whether the drop releases the file's locks, because only this process has the file.
    pub(crate) fn releases_locks(&self) -> bool {
        self.releases_locks.load(Ordering::Acquire)
    }

    /// Sets whether the drop releases the file's locks. The locks belong to the open file
    /// description, which another process may share.
    pub(crate) fn set_releases_locks(&self, releases: bool) {
        self.releases_locks.store(releases, Ordering::Release);
    }

    /// Opens the same file again, through the page cache. `path` is the path by which it was
    /// opened.
    ///
    /// # Errors
    /// The kernel's error; ESTALE if there is no /proc and another file is at `path` by now.
    pub(crate) fn reopen_cached(&self, access: OFlags, path: &Path) -> rustix::io::Result<Self> {
        let flags = access | OFlags::CLOEXEC;
        let link = format!("/proc/self/fd/{}", self.raw());
        let descriptor = match rustix::fs::open(link, flags, Mode::empty()) {
            // A chroot or container without /proc.
            Err(Errno::NOENT | Errno::NOTDIR) => self.reopen_at(path, flags)?,
            opened => opened?,
        };
        Ok(self.through_page_cache(descriptor))
    }

    /// The same file through the page cache. `descriptor` is a second open of the file.
    pub(crate) fn through_page_cache(&self, descriptor: OwnedFd) -> Self {
        Self {
            descriptor,
            medium: self.medium,
            caching: Caching::PageCache,
            detached_syncs: Arc::clone(&self.detached_syncs),
            registrations: Registrations::new(FileId::take()),
            pollable: Pollable::none(),
            // The first `File` takes the locks.
            releases_locks: AtomicBool::new(false),
        }
    }

    /// Opens the path and checks that it is this file.
    fn reopen_at(&self, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        // A new file at the path may be a FIFO, and its open would block.
        let descriptor = rustix::fs::open(path, flags | OFlags::NONBLOCK, Mode::empty())?;
        let identity = |descriptor: &OwnedFd| {
            rustix::fs::fstat(descriptor).map(|status| (status.st_dev, status.st_ino))
        };
        if identity(&descriptor)? != identity(&self.descriptor)? {
            return Err(Errno::STALE);
        }
        rustix::fs::fcntl_setfl(&descriptor, flags & !OFlags::CLOEXEC)?;
        Ok(descriptor)
    }

    /// The file's current path, for messages.
    pub(crate) fn path(&self) -> String {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", self.raw()));
        link.map_or_else(|_| "an open file".into(), |path| path.display().to_string())
    }

    pub(crate) fn raw(&self) -> RawFd {
        self.descriptor.as_raw_fd()
    }
}

impl Drop for File {
    /// Releases the locks explicitly. Reason: a ring may keep the file open a little longer, in a
    /// slot or for a completed operation.
    fn drop(&mut self) {
        if *self.releases_locks.get_mut() {
            // This fails on a file system without locks, where no lock exists.
            let _ = byte_lock::release_all(self.descriptor.as_fd());
        }
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}
