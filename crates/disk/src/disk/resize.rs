//! Longer and shorter disks.
//!
//! What a longer disk would bring to light (the rest of the last cluster, bytes of the backing file) is
//! made zeros, durably, before the size changes: no crash shows it. A shorter disk loses what lies
//! beyond, also the rest of its last cluster.

use blockhouse_core::{ByteRange, Error, ErrorKind, Fallback, Result, Storage, SyncMode, Unmap};

use futures_util::future::Either;

use super::Disk;
use super::quiesce::{QuiescedGuard, WriteGuard};
use crate::durability::RequestSync;
use crate::write::ZeroOptions;

const ZERO: ZeroOptions = ZeroOptions { unmap: Unmap::Allowed, fallback: Fallback::Allowed };

impl<S: Storage> Disk<S> {
    /// Makes the disk longer; new bytes read as zeros. Durable when it returns.
    ///
    /// # Errors
    /// `ReadOnly`; `InvalidInput` for a smaller size or one that is no multiple of 512.
    pub async fn resize(&self, size: u64) -> Result<()> {
        self.check_access(size)?;
        let _change = self.begin_resize().await;
        // It may have become read-only meanwhile.
        self.check_access(size)?;
        // Nothing may be on its way to a last partial block, which becomes an ordinary one.
        let claim = self.layer().claim_end(self.size()).await;
        let old = self.size();
        if size < old {
            let what = format!("cannot make a disk of {old} bytes shorter: {size}");
            return Err(Error::new(ErrorKind::InvalidInput, what).on(self.name()));
        }
        if let Some(uncovered) = self.uncovered(old, size) {
            self.format().prepare_resize(size).await?;
            // Durable with the flush below.
            let sync = RequestSync::not_required(self.format());
            self.writer().write_zeroes(uncovered, ZERO, &sync, &claim).await?;
            self.format().flush(SyncMode::Data).await?;
        }
        self.format().resize(size).await?;
        self.format().flush(SyncMode::Full).await
    }

    /// Makes the disk shorter: what lies beyond `size` is lost. Durable when it returns. No request may
    /// be in flight beyond the new end.
    ///
    /// # Errors
    /// `ReadOnly`; `InvalidInput` for a larger size, one that is no multiple of 512, or an image of
    /// qcow2 version 2 with snapshots; or what the storage answers.
    pub async fn shrink(&self, size: u64) -> Result<()> {
        self.check_access(size)?;
        let _change = self.begin_resize().await;
        // It may have become read-only meanwhile.
        self.check_access(size)?;
        let claim = self.layer().claim_end(size).await;
        if size > self.size() {
            let what = format!("cannot shrink a disk of {} bytes to {size}", self.size());
            return Err(Error::new(ErrorKind::InvalidInput, what).on(self.name()));
        }
        self.format().shrink(size).await?;
        // A data file ends with the disk.
        if self.data_file().is_none()
            && let Some(rest) = self.uncovered(size, self.format().end())
        {
            let sync = RequestSync::not_required(self.format());
            self.writer().write_zeroes(rest, ZERO, &sync, &claim).await?;
        }
        self.format().flush(SyncMode::Full).await
    }

    /// A snapshot is taken before or after this, never beside it: tables change here. Bitmaps change as a whole, so
    /// where there are any, no change of the guest's is made beside it either.
    async fn begin_resize(&self) -> Either<QuiescedGuard<'_>, WriteGuard<'_>> {
        if !self.format().has_bitmaps() {
            let change = self.begin_change().await;
            // The first one may have been added while this waited. None is added from here on.
            if !self.format().has_bitmaps() {
                return Either::Right(change);
            }
        }
        Either::Left(self.quiesce().await)
    }

    /// The new bytes of a disk that became longer which would not read as zeros by themselves: those
    /// of the last old cluster, and those that the backing file has; all of them where each needs
    /// a place. Up to the end of a block: clusters consist of whole ones.
    fn uncovered(&self, old: u64, new: u64) -> Option<ByteRange> {
        let cluster_end = old.next_multiple_of(self.cluster_size()?);
        let backing_end = self.layer().backing_size();
        let needed =
            if self.format().is_fully_allocated() { new } else { cluster_end.max(backing_end) };
        let end = needed.min(new);
        let end = end.next_multiple_of(self.layer().block_size());
        (end > old).then(|| ByteRange::between(old, end))
    }
}
