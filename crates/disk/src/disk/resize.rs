//! Makes disks longer or shorter.
//!
//! Old bytes in the new part of a longer disk (the rest of the last cluster, bytes of the backing
//! file) are zeroed, durably, before the size changes, so not even a crash exposes them. A shorter
//! disk loses the data beyond its end, also the rest of its last cluster.
//!
//! If the disk has bitmaps, guests' changes wait while all tables change. Changes do not wait while
//! the new part is prepared, which may take long.

use blockhouse_core::{
    ByteRange, Error, ErrorKind, Fallback, Result, Storage, SyncMode, Unmap, rare,
};
use futures_util::future::Either;

use super::quiesce::{QuiescedGuard, WriteGuard};
use super::{Disk, quiesce_flushed};
use crate::claims::Claim;
use crate::durability::RequestSync;
use crate::transient_bitmaps::TransientBitmaps;
use crate::write::ZeroOptions;

const ZERO: ZeroOptions =
    ZeroOptions { unmap: Unmap::Allowed, fallback: Fallback::Allowed, writes_small: true };
/// Bytes of a disk that are prepared together. A change of the whole image waits for at most one
/// such piece.
const PIECE: u64 = 16 << 30;

/// The state in which the new part of a disk was prepared. If the state differs later, the part is
/// prepared again.
#[derive(PartialEq, Eq)]
struct Prepared {
    /// The disk's size.
    old: u64,
    /// How often the disk was quiesced.
    quiesced: u64,
}

impl<S: Storage> Disk<S> {
    /// Makes the disk longer; new bytes read as zeros. Durable when it returns.
    ///
    /// # Errors
    /// `ReadOnly`; `InvalidInput` for a smaller size or one that is no multiple of 512, or of the
    /// disk's sectors; `Io` if requests in flight take too long.
    pub async fn resize(&self, size: u64) -> Result<()> {
        self.check_writable()?;
        let prepared = if Resize(self).has_bitmaps() {
            rare(Resize(self).prepare_ahead(size)).await?
        } else {
            None
        };
        let change = Resize(self).begin().await?;
        // The disk may have become read-only since the first check.
        self.check_writable()?;
        // No change of a last partial block may be in flight, because the block becomes an ordinary
        // one.
        let claim = self.patiently(self.image().layer().claims().claim_end(self.size())).await?;
        let old = self.size();
        if size < old {
            let what = format!("cannot make a disk of {old} bytes shorter: {size}");
            return Err(Error::new(ErrorKind::InvalidInput, what).on(self.name()));
        }
        let sector = self.logical_block_size();
        if !size.is_multiple_of(sector) {
            let what = format!("cannot make a disk with sectors of {sector} bytes {size} long");
            return Err(Error::new(ErrorKind::InvalidInput, what).on(self.name()));
        }
        // The preparation is valid if only this resize has quiesced the disk since then.
        let own = u64::from(matches!(change, Either::Left(_)));
        let quiesced = self.quiesce.count().wrapping_sub(own);
        if prepared != Some(Prepared { old, quiesced }) {
            rare(Resize(self).prepare(old, ByteRange::between(old, size), &claim)).await?;
        }
        let bitmaps = self.transient_bitmaps.get().resized(size)?;
        let outcome = rare(self.image().format().size_change().grow(size)).await;
        Resize(self).set_transient_bitmaps(bitmaps, size);
        outcome?;
        rare(self.image().format().flush(SyncMode::Full)).await
    }

    /// Makes the disk shorter: bytes beyond `size` are lost. Durable when it returns. No request
    /// may be in flight beyond the new end.
    ///
    /// # Errors
    /// `ReadOnly`; `InvalidInput` for a larger size, one that is no multiple of 512, or an image of
    /// qcow2 version 2 with snapshots; `Io` if requests in flight take too long; storage errors.
    pub async fn shrink(&self, size: u64) -> Result<()> {
        self.check_writable()?;
        let _change = Resize(self).begin().await?;
        // The disk may have become read-only since the first check.
        self.check_writable()?;
        let claim = self.patiently(self.image().layer().claims().claim_end(size)).await?;
        if size > self.size() {
            let what = format!("cannot shrink a disk of {} bytes to {size}", self.size());
            return Err(Error::new(ErrorKind::InvalidInput, what).on(self.name()));
        }
        if size == self.size() {
            return self.flush().await;
        }
        let bitmaps = self.transient_bitmaps.get().resized(size)?;
        let outcome = rare(self.image().format().size_change().shrink(size)).await;
        Resize(self).set_transient_bitmaps(bitmaps, size);
        outcome?;
        // An external data file ends with the disk, so it has no rest of a cluster.
        if self.image().data_file().is_none()
            && let Some(rest) = Resize(self).uncovered(size, self.image().format().end())
        {
            let sync = RequestSync::not_required(self.image().format());
            rare(self.image().writer().write_zeroes(rest, ZERO, &sync, &claim)).await?;
        }
        rare(self.image().format().flush(SyncMode::Full)).await
    }
}

/// The steps of a resize.
pub(crate) struct Resize<'a, S: Storage>(pub(crate) &'a Disk<S>);

impl<'a, S: Storage> Resize<'a, S> {
    /// Prepares the new part of a longer disk. Meanwhile writes continue; a change of the whole
    /// image waits for one piece at most. `None` if the result must not be used.
    async fn prepare_ahead(&self, size: u64) -> Result<Option<Prepared>> {
        let (old, quiesced) = (self.0.size(), self.0.quiesce.count());
        self.0.image().format().size_change().check(size)?;
        let mut rest = ByteRange::between(old.min(size), size);
        while !rest.is_empty() {
            let _change = self.0.quiesce.begin_write().await;
            self.0.check_writable()?;
            let claim = self.0.image().layer().claims().claim_end(old);
            let claim = self.0.patiently(claim).await?;
            if self.0.size() != old {
                return Ok(None);
            }
            let piece = rest.truncate(PIECE);
            self.prepare(old, piece, &claim).await?;
            rest = rest.skip(piece.length());
        }
        Ok(Some(Prepared { old, quiesced }))
    }

    /// Prepares a part past the disk's end, durably, so that it reads as zeros when the disk has
    /// grown.
    async fn prepare(&self, old: u64, part: ByteRange, claim: &Claim<'_>) -> Result<()> {
        if part.is_empty() {
            return Ok(());
        }
        self.0.image().format().size_change().prepare(part.offset(), part.end()).await?;
        if let Some(uncovered) = self.uncovered(old, part.end()) {
            // Durable with the flush below.
            let sync = RequestSync::not_required(self.0.image().format());
            let uncovered = uncovered.after(part.offset());
            self.0.image().writer().write_zeroes(uncovered, ZERO, &sync, claim).await?;
        }
        self.0.image().format().flush(SyncMode::Data).await
    }

    /// Sets the bitmaps of the new size if the disk has it, also after an error: a size change can
    /// fail after the new size is visible, and bitmaps of another size would lose changes.
    pub(crate) fn set_transient_bitmaps(&self, bitmaps: TransientBitmaps, size: u64) {
        if self.0.size() == size {
            self.0.transient_bitmaps.set(bitmaps, &self.0.observers);
        }
    }

    /// Whether there are bitmaps, of the image or in memory.
    fn has_bitmaps(&self) -> bool {
        self.0.image().format().has_bitmaps() || !self.0.transient_bitmaps.get().is_empty()
    }

    /// Begins a change of tables, which must not overlap a snapshot. If there are bitmaps, guests'
    /// changes are held off, too, because bitmaps are resized as a whole.
    pub(crate) async fn begin(&self) -> Result<Either<QuiescedGuard<'a>, WriteGuard<'a>>> {
        if !self.has_bitmaps() {
            let change = self.0.quiesce.begin_write().await;
            // The first bitmap may have been added during the wait. None is added from here on.
            if !self.has_bitmaps() {
                return Ok(Either::Right(change));
            }
        }
        Ok(Either::Left(quiesce_flushed(self.0, SyncMode::Data).await?))
    }

    /// The new bytes of a grown disk that would not read as zeros by themselves: the rest of the
    /// last old cluster, and bytes of the backing file; for a raw disk, bytes that its file has
    /// already. The range ends at the end of a block, because clusters consist of whole blocks.
    fn uncovered(&self, old: u64, new: u64) -> Option<ByteRange> {
        let cluster_end = old.next_multiple_of(self.0.image().cluster_size()?);
        let needed = if self.0.image().format().is_fully_allocated() {
            self.0.image().format().data().size()
        } else {
            let backing = self.0.image().layer().backing_layer().map(|layer| layer.size());
            cluster_end.max(backing.unwrap_or(0))
        };
        let end = needed.min(new);
        let end = end.next_multiple_of(self.0.image().layer().block_size());
        (end > old).then(|| ByteRange::between(old, end))
    }
}
