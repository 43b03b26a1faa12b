//! An open file as the engines see it.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};

use crate::orphans::Orphans;

/// An open file and what an engine must know to choose a way for it.
pub(crate) struct File {
    descriptor: OwnedFd,
    pub(crate) residence: Residence,
    pub(crate) caching: Caching,
    /// Of the file, however often it is open.
    pub(crate) orphans: Arc<Orphans>,
}

/// Where the bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Residence {
    /// In memory (tmpfs): an operation is a copy and never waits for a device, so that doing it on
    /// the spot is cheaper than any way to do it asynchronously.
    Memory,
    /// Behind something that may take its time.
    Device,
}

/// Whether the host's page cache stands in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Caching {
    /// `O_DIRECT`.
    Direct,
    PageCache,
}

impl File {
    pub(crate) fn new(descriptor: OwnedFd, residence: Residence, caching: Caching) -> Self {
        Self { descriptor, residence, caching, orphans: Arc::default() }
    }

    /// The same file opened once more, through the page cache.
    pub(crate) fn reopen_cached(&self, access: OFlags) -> rustix::io::Result<Self> {
        let path = format!("/proc/self/fd/{}", self.raw());
        let descriptor = rustix::fs::open(path, access | OFlags::CLOEXEC, Mode::empty())?;
        let orphans = Arc::clone(&self.orphans);
        Ok(Self { descriptor, residence: self.residence, caching: Caching::PageCache, orphans })
    }

    pub(crate) fn raw(&self) -> RawFd {
        self.descriptor.as_raw_fd()
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}
