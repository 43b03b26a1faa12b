//! Passes the open files of a [`HostFile`] to another process, or to another value in this process.
//!
//! Guarantee: the process that adopts them has the same open file descriptions. Byte locks are
//! never released meanwhile. A writeback error that no flush has reported yet is reported to the
//! next flush (`errseq_t`), whichever of the two processes issues it.

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
    /// The open file that is flushed, if it is neither `file` nor `tail`.
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

    /// Releases the file's locks while the file stays open.
    pub fn release_locks(&self) {
        if let Err(error) = byte_lock::release_all(self.descriptor()) {
            tracing::warn!("{}: cannot give its locks back: {error}", self.name);
        }
    }

    /// Whether another process that has handed the file over holds its locks as well, because
    /// [`own_locks`](Self::own_locks) was not called yet.
    pub fn shares_locks(&self) -> bool {
        !self.file.releases_locks()
    }

    /// From now on the locks belong to this process alone: a drop of the value releases them.
    pub fn own_locks(&self) {
        self.file.set_releases_locks(true);
    }

    /// From now on the locks belong to `other`, which [shares](Self::share) the open files.
    pub fn move_locks_to(&self, other: &Self) {
        self.file.set_releases_locks(false);
        other.file.set_releases_locks(true);
    }
}
