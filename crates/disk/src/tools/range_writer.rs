//! The write side of copies, streams, mirrors and rebases. Data is written to a range of a disk, in
//! plain or compressed clusters; zeros become holes.

use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blockhouse_core::sync::run_all;
use blockhouse_core::{
    Buffer, ByteRange, Durability, Error, ErrorKind, Fallback, Request, Result, Storage, Unmap,
};

use super::new_image::NewImage;
use super::zeros::{is_zero, lend, runs, units};
use crate::disk::Disk;
use crate::parts::MAX_IN_FLIGHT;
use crate::write::CompressResult;

/// The shortest run of zeros, in bytes, that becomes a hole.
const MIN_HOLE: u64 = 4096;

/// The target of a copy.
enum Target<D, S: Storage> {
    Disk(D),
    /// A new image, which initially reads as zeros or as its parent's data.
    New(Arc<NewImage<S>>),
}

/// The writes to the target of a copy.
pub(super) struct RangeWriter<D, S: Storage> {
    target: Target<D, S>,
    compress: bool,
    /// Bytes that are checked together for zeros.
    unit: usize,
    /// Whether zeros are written like data.
    is_dense: bool,
    /// Whether the target's limits apply to the writes.
    is_limited: bool,
    written: AtomicU64,
}

impl<S: Storage, D: Deref<Target = Disk<S>>> RangeWriter<D, S> {
    /// Writes to `target`, with `compress` in compressed clusters if that saves space.
    ///
    /// # Errors
    /// `InvalidInput` if the target's format has no compressed clusters.
    pub(super) fn new(target: D, compress: bool) -> Result<Self> {
        let image = target.image();
        if compress && image.compression().is_none() {
            let what = format!("{} has no compressed clusters", image.format_name());
            return Err(Error::new(ErrorKind::InvalidInput, what).on(image.name()));
        }
        let unit = if compress {
            image.cluster_size().unwrap_or(1)
        } else {
            image.allocation_unit().max(MIN_HOLE)
        };
        Ok(Self::with(Target::Disk(target), unit, compress))
    }

    /// Writes to a new image of another program's format.
    pub(super) fn to_new(image: Arc<NewImage<S>>) -> Self {
        let unit = image.stream_unit().or(image.overlay_unit()).unwrap_or(MIN_HOLE);
        Self::with(Target::New(image), unit, false)
    }

    fn with(target: Target<D, S>, unit: u64, compress: bool) -> Self {
        let (unit, written) = (unit as usize, AtomicU64::new(0));
        Self { target, compress, unit, is_dense: false, is_limited: true, written }
    }

    /// From now on, zeros are written like data.
    pub(super) fn write_zeros(&mut self) {
        self.is_dense = true;
    }

    /// Exempts the writes from the target's limits: a job has its own limits.
    pub(super) fn unlimited(self) -> Self {
        Self { is_limited: false, ..self }
    }

    /// Bytes that are checked together for zeros.
    pub(super) fn unit(&self) -> usize {
        self.unit
    }

    /// Bytes of data that were written.
    pub(super) fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    async fn submit(&self, target: &D, request: Request) -> Result<()> {
        if self.is_limited {
            target.submit(request).await
        } else {
            target.submit_unlimited(request).await
        }
    }

    /// The non-zero parts of a buffer that holds the disk's bytes from `offset` on.
    pub(super) fn data_of(&self, offset: u64, bytes: &[u8]) -> Vec<Range<usize>> {
        runs(bytes.len(), offset, self.unit, |unit| self.is_dense || !is_zero(&bytes[unit]))
    }

    /// Zeroes parts of the target. The ranges in `holes` are relative to `offset`.
    pub(super) async fn make_holes(
        &self,
        offset: u64,
        holes: impl IntoIterator<Item = Range<usize>>,
    ) -> Result<()> {
        let Target::Disk(target) = &self.target else { return Ok(()) };
        let make = holes.into_iter().map(|hole| {
            let range = ByteRange::between(offset + hole.start as u64, offset + hole.end as u64);
            let (unmap, fallback, durability) =
                (Unmap::Allowed, Fallback::Allowed, Durability::None);
            self.submit(target, Request::WriteZeroes { range, unmap, fallback, durability })
        });
        run_all(MAX_IN_FLIGHT, make).await
    }

    /// Writes the first `length` bytes of `new` to the target at `offset`, where they differ from
    /// `old`, the target's current content. Zeros that are written like data are always written,
    /// because the target may have no space for them.
    pub(super) async fn update(
        &self,
        offset: u64,
        length: usize,
        new: &mut Buffer,
        old: &Buffer,
    ) -> Result<()> {
        let (bytes, old) = (new.bytes(), old.bytes());
        let differs = |unit: Range<usize>| bytes[unit.clone()] != old[unit];
        // A hole in a new image does not hide the parent's data.
        let has_holes = matches!(self.target, Target::Disk(_));
        let is_empty =
            |unit: &Range<usize>| has_holes && !self.is_dense && is_zero(&bytes[unit.clone()]);
        let data = runs(length, offset, self.unit, |unit| {
            !is_empty(&unit) && (self.is_dense && is_zero(&bytes[unit.clone()]) || differs(unit))
        });
        let holes = runs(length, offset, self.unit, |unit| is_empty(&unit) && differs(unit));
        self.make_holes(offset, holes).await?;
        self.store(offset, data, new).await
    }

    /// Writes parts of the buffer, which holds the disk's bytes from `offset` on.
    pub(super) async fn store(
        &self,
        offset: u64,
        data: Vec<Range<usize>>,
        buffer: &mut Buffer,
    ) -> Result<()> {
        let sum: usize = data.iter().map(ExactSizeIterator::len).sum();
        match (&self.target, self.compress) {
            (Target::New(image), _) => image.store(offset, data, buffer).await?,
            (Target::Disk(target), false) => self.write(target, offset, data, buffer).await?,
            (Target::Disk(target), true) => {
                let unit = self.unit;
                for cluster in data.into_iter().flat_map(|run| units(run, offset, unit)) {
                    self.store_cluster(target, offset, cluster, buffer).await?;
                }
            }
        }
        self.written.fetch_add(sum as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Writes a cluster or a part of one; compressed if possible.
    async fn store_cluster(
        &self,
        target: &D,
        offset: u64,
        cluster: Range<usize>,
        buffer: &mut Buffer,
    ) -> Result<()> {
        let at = offset + cluster.start as u64;
        let bytes = &buffer.bytes()[cluster.clone()];
        let is_whole = bytes.len() == self.unit
            || at.is_multiple_of(self.unit as u64) && at + bytes.len() as u64 == target.size();
        let is_stored =
            is_whole && target.write_compressed(at, bytes).await? != CompressResult::Incompressible;
        if is_stored { Ok(()) } else { self.write(target, offset, vec![cluster], buffer).await }
    }

    async fn write(
        &self,
        target: &D,
        offset: u64,
        data: Vec<Range<usize>>,
        buffer: &mut Buffer,
    ) -> Result<()> {
        let parts = lend(buffer, &data);
        run_all(
            MAX_IN_FLIGHT,
            parts.into_iter().zip(&data).map(|(from, part)| {
                let offset = offset + part.start as u64;
                self.submit(target, Request::Write { offset, from, durability: Durability::None })
            }),
        )
        .await
    }
}
