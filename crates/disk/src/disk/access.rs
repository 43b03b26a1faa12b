//! The access mode of a disk, and its change while the disk is in use.
//!
//! Guarantee: once a disk is read-only, no change is in flight, and all completed changes are
//! durable. Until the disk is writable again, changes are refused, including changes that were
//! submitted before and waited. Reads continue. The image stays open and locked. A disk that was
//! [retired](super::QuiescedDisk::retire) stays read-only. A disk that was made read-only after its
//! opening stays read-only when its image is replaced.

use blockhouse_core::{Error, ErrorKind, Result, Storage, SyncMode, rare};

use super::{Disk, quiesce_flushed};
use crate::options::Access;

impl<S: Storage> Disk<S> {
    /// The current access mode.
    pub fn access(&self) -> Access {
        if self.protection.is_on() { Access::ReadOnly } else { self.image().access() }
    }

    /// The disk's new location, if the disk may no longer be changed here.
    pub fn retired_to(&self) -> Option<&str> {
        self.protection.retired_to()
    }

    /// Makes a disk in use read-only, after the changes in flight have completed and are durable;
    /// or makes it writable again.
    ///
    /// # Errors
    /// `ReadOnly` if `access` is `ReadWrite` and the disk was opened for reading only, or has moved
    /// elsewhere. Storage errors of the flush, or `Io` if changes in flight take too long; then the
    /// disk stays writable.
    pub async fn set_access(&self, access: Access) -> Result<()> {
        if access == Access::ReadWrite {
            return allow_changes(self);
        }
        if self.access() == Access::ReadOnly {
            return Ok(());
        }
        let _quiesced = rare(quiesce_flushed(self, SyncMode::Full)).await?;
        rare(self.image().layer().flush(SyncMode::Full)).await?;
        self.protection.set(true);
        Ok(())
    }

    /// As [`set_access`](Self::set_access) to read-only, for a disk that nothing has used yet:
    /// nothing has to be flushed.
    pub fn protect_unused(&self) {
        self.protection.set(true);
    }

    /// Refuses changes of a disk that is read-only.
    pub fn check_writable(&self) -> Result<()> {
        if self.access() == Access::ReadWrite {
            return Ok(());
        }
        let what = match self.protection.retired_to() {
            Some(moved_to) => format!("the disk was moved to {moved_to}, and is only read here"),
            None if is_inactive(self) => "the disk is inactive, and is only read".to_owned(),
            None => "the disk is open for reading only".to_owned(),
        };
        Err(Error::new(ErrorKind::ReadOnly, what).on(self.name()))
    }
}

/// As [`Disk::check_writable`], for a request at `offset`.
pub(super) fn check_writable_at<S: Storage>(disk: &Disk<S>, offset: u64) -> Result<()> {
    disk.check_writable().map_err(|error| error.at(offset))
}

/// Whether a disk's image is open for reading only and without a lock, because another program may
/// change it, until it is opened again.
pub fn is_inactive<S: Storage>(disk: &Disk<S>) -> bool {
    disk.image().options.is_inactive
}

/// Makes a disk writable again.
fn allow_changes<S: Storage>(disk: &Disk<S>) -> Result<()> {
    let refuse = |what: String, hint: &'static str| {
        Err(Error::new(ErrorKind::ReadOnly, what).on(disk.name()).hint(hint))
    };
    if let Some(moved_to) = disk.protection.retired_to() {
        return refuse(
            format!("the disk was moved to {moved_to}"),
            "change it there, and close it here",
        );
    }
    if disk.image().access() == Access::ReadOnly {
        return refuse(
            "the disk was opened for reading only".into(),
            "close it and open it again for writing",
        );
    }
    disk.protection.set(false);
    Ok(())
}
