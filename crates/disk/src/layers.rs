//! Reading what is not simply in the image's file: compressed clusters, the disk behind this one, and
//! places that lie less well aligned than the storage demands.

use std::sync::Arc;

use blockhouse_core::{Buffer, ByteRange, Error, ErrorKind, Extent, IoVector, Result, Storage};
use futures_util::future::LocalBoxFuture;

use crate::Disk;
use crate::limits::PIECE;
use crate::path::fill_with_zeros;
use crate::unpacked::PackedPlace;

impl<S: Storage> Disk<S> {
    /// Reads from the storage, through a buffer where the place does not suit it: subclusters can be
    /// smaller than its blocks.
    pub(crate) async fn read_place(&self, host: u64, into: IoVector) -> Result<()> {
        let block = u64::from(self.alignment.offset);
        let is_aligned = (host | into.len() as u64) & (block - 1) == 0;
        // Where the disk is the storage only its end is not aligned, and the storage takes that as it is.
        if is_aligned || self.format.is_identity() {
            return self.storage().read(host, into).await;
        }
        Box::pin(self.read_misaligned(host, into)).await
    }

    async fn read_misaligned(&self, host: u64, mut into: IoVector) -> Result<()> {
        let mut rest = ByteRange::between(host, host + into.len() as u64);
        while !rest.is_empty() {
            let piece = rest.truncate(PIECE as u64);
            let outer = piece.align_outward(u64::from(self.alignment.offset));
            let mut memory = self.clusters.for_unpacking(outer.length() as usize, 0).await?;
            self.storage().read(outer.offset(), memory.packed.lend()).await?;
            let start = (piece.offset() - outer.offset()) as usize;
            let length = piece.length() as usize;
            into.copy_from(&memory.packed.bytes()[start..start + length]);
            into.advance(length);
            rest = rest.skip(piece.length());
        }
        Ok(())
    }

    /// Fills `into` with the extent's bytes of the cluster whose compressed form is at most
    /// `length` bytes from `host` on.
    pub(crate) async fn read_compressed(
        &self,
        extent: &Extent,
        host: u64,
        length: u64,
        mut into: IoVector,
    ) -> Result<()> {
        let Some(place) = ByteRange::new(host, length) else {
            return Err(self.misplaced(extent));
        };
        let packed = PackedPlace { guest: extent.alloc_range, host: place };
        let cell = match extent.guest == extent.alloc_range {
            // Nothing of it is left for the next read.
            true => self.unpacked.find(packed).unwrap_or_default(),
            false => self.unpacked.find_or_add(packed),
        };
        let cluster = cell.get_or_try_init(|| self.unpack(packed)).await?;
        let skipped = (extent.guest.offset() - extent.alloc_range.offset()) as usize;
        into.copy_from(&cluster.bytes()[skipped..skipped + into.len()]);
        Ok(())
    }

    /// The bytes of a compressed cluster.
    async fn unpack(&self, place: PackedPlace) -> Result<Buffer> {
        let PackedPlace { guest, host } = place;
        let outer = host.align_outward(u64::from(self.alignment.offset));
        let whole = guest.length() as usize;
        let mut memory = self.clusters.for_unpacking(outer.length() as usize, whole).await?;
        self.storage().read(outer.offset(), memory.packed.lend()).await?;
        let start = (host.offset() - outer.offset()) as usize;
        // What is behind the end of the file is no part of it, not even as zeros.
        let length = self.storage().size().saturating_sub(host.offset()).min(host.length());
        let packed = &memory.packed.bytes()[start..start + length as usize];
        self.stats.unpacked();
        self.format.decompress(packed, memory.cluster.bytes_mut()).map_err(|why| {
            let guest = guest.offset();
            let what = format!("cannot unpack the cluster of the guest's offset {guest} ({why})");
            Error::new(ErrorKind::Corrupt, what)
                .on(self.name())
                .at(host.offset())
                .hint("its compressed data is damaged: restore it from a copy of the image")
        })?;
        Ok(memory.cluster)
    }

    /// Fills `into` with the bytes of `range` from the disk behind this one; zeros past its end.
    pub(crate) fn read_behind(
        &self,
        range: ByteRange,
        mut into: IoVector,
    ) -> LocalBoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let backing = self.backing()?;
            let inside = within(range, backing.size());
            fill_with_zeros(into.split_off(inside.length() as usize)).await?;
            if inside.is_empty() {
                return Ok(());
            }
            backing.submit_read(inside.offset(), into).await
        })
    }

    pub(crate) fn backing(&self) -> Result<&Arc<Disk<S>>> {
        self.backing.as_ref().ok_or_else(|| {
            let what = "the image needs its backing file, which was not opened with it";
            Error::new(ErrorKind::Unsupported, what).on(self.name())
        })
    }
}

/// The first bytes of `range` that lie before `end`.
pub(crate) fn within(range: ByteRange, end: u64) -> ByteRange {
    range.truncate(end.saturating_sub(range.offset()))
}
