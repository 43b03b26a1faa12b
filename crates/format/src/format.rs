//! The interface between the I/O path and an image format.
//!
//! Only [`Format`] knows the formats by name; the layers above call it. The methods for properties
//! of an image (clusters, the header, snapshots) are in `describe`, `header`, `snapshots` and
//! `bitmaps`.
//!
//! A write has three steps, so that after a crash no mapping refers to data that was not written:
//! `map` prepares an extent, the I/O path writes the data, `link` makes the extent visible (or
//! `abort` gives it back). The caller is responsible for the order of writes: two writes of the
//! same guest bytes may be in flight together only if neither allocates space.

use blockhouse_core::{
    ByteRange, Durability, Error, ErrorKind, Extent, IoVector, Result, Storage, SyncMode, rare,
};

use crate::qcow2::{DataWriteGuard, ImageRedo, ReadGuard};
use crate::{Abort, Flat, Intent, MetadataSync, Qcow2};

/// An open image: a format, and the storage that has the image. The I/O path distinguishes states
/// of extents, not formats. The [crate's page](crate) has an example.
pub enum Format<S: Storage> {
    /// Host offsets never change, or the image is only read.
    Flat(Flat<S>),
    /// L1 and L2 tables map the guest's clusters.
    Qcow2(Box<Qcow2<S>>),
}

impl<S: Storage> Format<S> {
    /// The size of the guest's disk in bytes, a multiple of 512.
    pub fn size(&self) -> u64 {
        match self {
            Self::Flat(flat) => flat.size(),
            Self::Qcow2(qcow2) => qcow2.size(),
        }
    }

    /// The end of the last allocation unit: [`size`](Self::size), rounded up to a multiple of the
    /// unit. Operations that are aligned to allocation units end here.
    pub fn end(&self) -> u64 {
        self.qcow2().map_or_else(|| self.size(), Qcow2::end)
    }

    /// The file that was opened; the side file if a raw image has one.
    pub fn storage(&self) -> &S {
        match self {
            Self::Flat(flat) => flat.storage(),
            Self::Qcow2(qcow2) => qcow2.storage(),
        }
    }

    /// The file that the host offsets of extents refer to: the image, or its data file.
    pub fn data(&self) -> &S {
        match self {
            Self::Flat(flat) => flat.data(),
            Self::Qcow2(qcow2) => qcow2.data(),
        }
    }

    /// The qcow2 image that has the disk's metadata: the image itself, or the side file of a raw
    /// image.
    pub(crate) fn qcow2(&self) -> Option<&Qcow2<S>> {
        match self {
            Self::Flat(flat) => flat.qcow2(),
            Self::Qcow2(qcow2) => Some(qcow2),
        }
    }

    /// As [`qcow2`](Self::qcow2), for a change of `what`.
    ///
    /// # Errors
    /// `Unsupported` if the format has no such metadata, `ReadOnly` if the format is only read.
    pub(crate) fn qcow2_with(&self, what: &str) -> Result<&Qcow2<S>> {
        match self {
            Self::Flat(flat) => flat.qcow2().ok_or_else(|| flat.lacks(what)),
            Self::Qcow2(qcow2) => Ok(qcow2),
        }
    }

    /// Attaches a guard to the memory of a write with copy-on-write padding (an extent whose
    /// `alloc_range` exceeds its `guest`). The drop of the guard tells the format that the write
    /// has ended, even if its future was dropped before.
    #[must_use]
    pub fn track_cow_write(&self, from: IoVector) -> IoVector {
        match self {
            Self::Flat(_) => from,
            Self::Qcow2(qcow2) => qcow2.track_cow_write(from),
        }
    }

    /// Maps the first bytes of `range`: returns an extent that starts with `range`, is not empty
    /// and does not exceed it. If the extent's guest offset is a multiple of the storage's
    /// alignment or of a smaller power of two, so is its host offset.
    ///
    /// `range` must not be empty, and must lie before [`end`](Self::end). For all intents but
    /// `Read`, `range` must be aligned as the storage demands (or stop at the end). For these
    /// intents, the caller passes every extent to exactly one of [`link`](Self::link) and
    /// [`abort`](Self::abort).
    pub async fn map(&self, range: ByteRange, intent: Intent) -> Result<Extent> {
        let extent = match self {
            Self::Flat(flat) => flat.map(range, intent).await?,
            Self::Qcow2(qcow2) => qcow2.map(range, intent).await?,
        };
        check_extent(self, range, intent, extent)
    }

    /// As [`map`](Self::map), for a change that leaves the content of the disk the same: bitmaps do
    /// not record it.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    pub async fn map_same_content(&self, range: ByteRange, intent: Intent) -> Result<Extent> {
        let extent = match self {
            Self::Flat(Flat::WithSideFile(side_file)) => side_file.map_same_content(range).await?,
            Self::Flat(flat) => flat.map(range, intent).await?,
            Self::Qcow2(qcow2) => qcow2.map_same_content(range, intent).await?,
        };
        check_extent(self, range, intent, extent)
    }

    /// As [`map`](Self::map) for a write, by a request that holds extents whose writes have not
    /// begun. `None` if the call would have to wait for extents of other requests. Reason: those
    /// requests may wait for extents of this one, which would be a deadlock.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    pub async fn map_next(&self, range: ByteRange) -> Result<Option<Extent>> {
        let extent = match self {
            Self::Flat(flat) => Some(flat.map(range, Intent::Write).await?),
            Self::Qcow2(qcow2) => qcow2.map_next(range).await?,
        };
        extent.map(|extent| check_extent(self, range, Intent::Write, extent)).transpose()
    }

    /// Begins a read. The caller calls this before [`map`](Self::map) with [`Intent::Read`], and
    /// drops the guard after the data was read. Until then the mapped host ranges are not reused,
    /// whatever is written, discarded and flushed at the same time. The holder must wait for
    /// nothing but reads. `None` if the format never reuses host ranges.
    pub fn begin_read(&self) -> Option<ReadGuard<'_>> {
        match self {
            Self::Flat(_) => None,
            Self::Qcow2(qcow2) => Some(qcow2.begin_read()),
        }
    }

    /// Waits for the reads that have [begun](Self::begin_read), but not for later ones.
    pub async fn reads_ended(&self) {
        match self {
            Self::Flat(_) => {}
            Self::Qcow2(qcow2) => qcow2.reads_ended().await,
        }
    }

    /// Begins a write without FUA that will need a metadata sync. The caller calls this before the
    /// data is written, and drops the guard when the write has ended, with or without an error. A
    /// [`flush`](Self::flush) or [`sync_data_and_metadata`](Self::sync_data_and_metadata) that has
    /// metadata to write first waits for the guards that exist, and so covers those writes as well.
    /// The holder must wait for nothing but the storage, and the write should be short. `None` if
    /// the format has no metadata.
    pub fn begin_data_write(&self) -> Option<DataWriteGuard<'_>> {
        self.qcow2().map(Qcow2::begin_data_write)
    }

    /// Makes the extent visible. Its data was written with the durability `data`; if there was no
    /// data to write, the caller passes `Durability::Data`. The mapping is durable after the next
    /// [`flush`](Self::flush) or metadata sync.
    pub async fn link(&self, extent: Extent, data: Durability) -> Result<()> {
        match self {
            Self::Flat(flat) => flat.link(),
            Self::Qcow2(qcow2) => qcow2.link(extent, data).await,
        }
    }

    /// Gives the extent back without making it visible. Never waits, so that `drop` can call it.
    pub fn abort(&self, extent: Extent, why: Abort) {
        // Extents of flat images are never new: there is nothing to undo.
        if let Self::Qcow2(qcow2) = self {
            qcow2.abort(extent, why);
        }
    }

    /// Makes everything linked so far durable: first the data, then the format's metadata. Waits
    /// for the writes that hold a guard of [`begin_data_write`](Self::begin_data_write).
    pub async fn flush(&self, sync: SyncMode) -> Result<()> {
        match self {
            Self::Flat(flat) => flat.flush(sync).await,
            Self::Qcow2(qcow2) => qcow2.flush(sync).await,
        }
    }

    /// Makes the mappings linked so far durable, and the data that they refer to. Unlike
    /// [`flush`](Self::flush), it need not make other data durable: it suffices for a write whose
    /// extents are all new, or were written with FUA.
    pub async fn sync_metadata(&self) -> Result<()> {
        match self.qcow2() {
            Some(qcow2) => qcow2.sync_metadata().await,
            None => Ok(()),
        }
    }

    /// As [`sync_metadata`](Self::sync_metadata), for extents whose data was written without FUA:
    /// waits for the writes that hold a guard of [`begin_data_write`](Self::begin_data_write),
    /// so that one writeback serves all of them.
    pub async fn sync_data_and_metadata(&self) -> Result<()> {
        match self.qcow2() {
            Some(qcow2) => qcow2.sync_data_and_metadata().await,
            None => Ok(()),
        }
    }

    /// The way in which extents that are prepared now become durable with the fewest operations.
    /// This is only advice: both ways are always correct.
    pub fn metadata_sync_mode(&self) -> MetadataSync {
        self.qcow2().map_or(MetadataSync::Flush, Qcow2::metadata_sync_mode)
    }

    /// The image's redo log; `None` without metadata, because then this process keeps no unwritten
    /// changes in memory.
    pub fn redo(&self) -> Option<ImageRedo<'_, S>> {
        self.qcow2().map(Qcow2::redo)
    }

    /// Discards all data of the image itself, so that the disk reads as the backing file (or as
    /// zeros without one). The change is durable when the call returns; a crash before may leave
    /// some of the data. No request may be in flight.
    ///
    /// # Errors
    /// `Unsupported` if the format has no backing files; or errors of the storage.
    pub async fn make_empty(&self) -> Result<()> {
        self.qcow2_with("backing file")?.make_empty().await
    }

    /// Brings the image on disk to a state that another process can open, with all extents linked
    /// so far: metadata is written and durable, and the image is not marked as open. No request may
    /// be in flight. The image stays open, and its metadata in memory stays valid as long as the
    /// other process changes nothing.
    ///
    /// # Errors
    /// Errors of the storage; a remembered failure to write metadata.
    pub async fn settle(&self) -> Result<()> {
        match self.qcow2() {
            Some(qcow2) => qcow2.settle().await,
            None => Ok(()),
        }
    }

    /// Writes the metadata that [`settle`](Self::settle) would write, including lazy refcounts, and
    /// flushes; requests may be in flight.
    ///
    /// # Errors
    /// As [`settle`](Self::settle).
    pub async fn flush_all(&self, sync: SyncMode) -> Result<()> {
        match self.qcow2() {
            Some(qcow2) => qcow2.flush_all(sync).await,
            None => self.flush(sync).await,
        }
    }

    /// Makes everything durable and ends the use of the image. No request may be in flight, and
    /// none may follow.
    pub async fn close(&self) -> Result<()> {
        match self {
            Self::Flat(flat) => flat.close().await,
            Self::Qcow2(qcow2) => rare(qcow2.close()).await,
        }
    }
}

/// Refuses an extent that does not start with `range` or exceeds it. Reason: callers split buffers
/// by extents, and a corrupt image must not cause more than the failure of this request.
fn check_extent<S: Storage>(
    format: &Format<S>,
    range: ByteRange,
    intent: Intent,
    extent: Extent,
) -> Result<Extent> {
    let Extent { guest, alloc_range, .. } = extent;
    let is_first = guest.offset() == range.offset() && !guest.is_empty();
    if is_first && range.contains(guest) && alloc_range.contains(guest) {
        return Ok(extent);
    }
    if intent != Intent::Read {
        format.abort(extent, Abort::Ended);
    }
    let what = format!("the {} mapping answers {extent:?} for {range}", format.name());
    Err(Error::new(ErrorKind::Corrupt, what).on(format.storage().name()).at(range.offset()))
}
