//! The open files of a [`HostFile`], on their way to another process, or to another value in this
//! one.
//!
//! Guarantee: the process that adopts them has the same open file descriptions. Byte locks are not
//! released for a moment, and a failure to write back that no flush has reported yet is reported to
//! the next one (`errseq_t`), whichever of the two processes issues it.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use super::HostFile;
use crate::driver::byte_lock;

/// The open files of a [`HostFile`]: one to three.
#[derive(Debug)]
pub struct OpenFiles<F> {
    /// The file, which holds the locks.
    pub file: F,
    /// The same file through the page cache, for the last partial block, if it has one.
    pub tail: Option<F>,
    /// The open file that is flushed, if it is neither of the two.
    pub flushed: Option<F>,
}

impl HostFile {
    /// The open files, for [`adopt`](Self::adopt) in another process.
    pub fn open_files(&self) -> OpenFiles<BorrowedFd<'_>> {
        let is_other = |file: &&_| !Arc::ptr_eq(file, &self.flushed);
        let flushed = [Some(&self.file), self.tail.as_ref()]
            .into_iter()
            .flatten()
            .all(|file| is_other(&file))
            .then(|| self.flushed.as_fd());
        OpenFiles {
            file: self.file.as_fd(),
            tail: self.tail.as_ref().map(|tail| tail.as_fd()),
            flushed,
        }
    }

    /// Gives its locks back while it stays open.
    pub fn release_locks(&self) {
        if let Err(error) = byte_lock::release_all(self.descriptor()) {
            tracing::warn!("{}: cannot give its locks back: {error}", self.name);
        }
    }

    /// Whether another process holds its locks as well: it has handed the file over, and
    /// [`own_locks`](Self::own_locks) was not called.
    pub fn shares_locks(&self) -> bool {
        !self.file.releases_locks()
    }

    /// The locks are this process's alone from now on: they are given back when the value is
    /// dropped.
    pub fn own_locks(&self) {
        self.file.set_releases_locks(true);
    }

    /// The locks are those of `other` from now on, which [shares](Self::share) the open files.
    pub fn move_locks_to(&self, other: &Self) {
        self.file.set_releases_locks(false);
        other.file.set_releases_locks(true);
    }
}
