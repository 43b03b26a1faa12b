//! An open file as the engines see it.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

/// An open file and what an engine must know to choose a way for it.
pub(crate) struct File {
    descriptor: OwnedFd,
    pub(crate) residence: Residence,
    pub(crate) caching: Caching,
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
        Self { descriptor, residence, caching }
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
