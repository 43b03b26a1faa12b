//! The interface between the I/O path and an image format.
//!
//! Only [`Format`] knows the formats by name; the layers above call it. The methods for properties
//! of an image (clusters, the header, snapshots) are in `describe`, `header`, `snapshots` and
//! `bitmaps`.
//!
//! Writing goes in three steps, so that no crash shows a mapping without its data: `map` prepares
//! an extent, the path moves the data, `link` makes the extent visible (or `abort` gives it back).
//! A format relies on its caller for order: two writes of the same guest bytes may be in flight
//! together only where they need no space of their own.

use blockhouse_core::{
    ByteRange, Durability, Error, ErrorKind, Extent, IoVector, Result, Storage, SyncMode,
};

use crate::qcow2::{DataWriteGuard, ImageRedo, ReadGuard};
use crate::{Abort, Flat, Intent, MetadataSync, Qcow2};

/// An image format over the storage that holds the image. The I/O path has one arm for each state
/// of an extent, not one for each format. The [crate's page](crate) has an example.
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
    /// unit. Block-aligned operations stop here.
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

    /// The qcow2 that has metadata of the disk: the image, or the side file of a raw one.
    pub(crate) fn qcow2(&self) -> Option<&Qcow2<S>> {
        match self {
            Self::Flat(flat) => flat.qcow2(),
            Self::Qcow2(qcow2) => Some(qcow2),
        }
    }

    /// As [`qcow2`](Self::qcow2), for a change of `what`.
    ///
    /// # Errors
    /// `Unsupported` where the format has none, `ReadOnly` where it is only read.
    pub(crate) fn qcow2_with(&self, what: &str) -> Result<&Qcow2<S>> {
        match self {
            Self::Flat(flat) => flat.qcow2().ok_or_else(|| flat.lacks(what)),
            Self::Qcow2(qcow2) => Ok(qcow2),
        }
    }

    /// Attaches a guard to the memory of a write that carries copy-on-write padding (an extent
    /// whose `alloc_range` exceeds its `guest`). The drop of the guard tells the format that the
    /// write has ended, even after its future was dropped.
    #[must_use]
    pub fn track_cow_write(&self, from: IoVector) -> IoVector {
        match self {
            Self::Flat(_) => from,
            Self::Qcow2(qcow2) => qcow2.track_cow_write(from),
        }
    }

    /// Maps the first bytes of `range`: returns an extent that starts where `range` does, is not
    /// empty and does not reach beyond it. Its host offset is as well aligned as its guest offset,
    /// up to the storage's alignment.
    ///
    /// `range` must not be empty, must lie before [`end`](Self::end), and for all intents but
    /// `Read` must be aligned as the storage demands (or stop at the end). Every extent of those
    /// intents is handed back by exactly one of [`link`](Self::link) and
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
        match self {
            Self::Flat(Flat::WithSideFile(side_file)) => side_file.map_same_content(range).await,
            Self::Flat(flat) => flat.map(range, intent).await,
            Self::Qcow2(qcow2) => qcow2.map_same_content(range, intent).await,
        }
    }

    /// As [`map`](Self::map) for a write, by a request that holds extents whose writes have not
    /// begun. `None` if it would have to wait for extents of other requests. Reason: they may wait
    /// for those of this request, which would be a deadlock.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    pub async fn map_next(&self, range: ByteRange) -> Result<Option<Extent>> {
        match self {
            Self::Flat(flat) => flat.map(range, Intent::Write).await.map(Some),
            Self::Qcow2(qcow2) => qcow2.map_next(range).await,
        }
    }

    /// Begins a read: to be called before [`map`](Self::map) with [`Intent::Read`], and the guard
    /// to be dropped when the data is read. Until then the mapped host ranges get no new owner,
    /// whatever is written, discarded and flushed meanwhile. The holder must wait for nothing
    /// but reads. `None` where host ranges never change their owner.
    pub fn begin_read(&self) -> Option<ReadGuard<'_>> {
        match self {
            Self::Flat(_) => None,
            Self::Qcow2(qcow2) => Some(qcow2.begin_read()),
        }
    }

    /// Waits for the reads that have [begun](Self::begin_read), and not for later ones.
    pub async fn reads_ended(&self) {
        match self {
            Self::Flat(_) => {}
            Self::Qcow2(qcow2) => qcow2.reads_ended().await,
        }
    }

    /// Begins a write without FUA that will need a metadata sync: to be called before the data is
    /// written, and the guard to be dropped when the write has ended, with or without an error. A
    /// [`flush`](Self::flush) or [`sync_data_and_metadata`](Self::sync_data_and_metadata) that has
    /// metadata to write first waits for the guards that exist, and so covers those writes as well.
    /// The holder must wait for nothing but the storage, and the write should be short. `None`
    /// where the format has no metadata.
    pub fn begin_data_write(&self) -> Option<DataWriteGuard<'_>> {
        self.qcow2().map(Qcow2::begin_data_write)
    }

    /// Makes the extent visible: its data is in the storage, as durable as `data` says. The mapping
    /// is durable after the next [`flush`](Self::flush) or metadata sync. Without data the
    /// caller passes `Durability::Data`.
    pub async fn link(&self, extent: Extent, data: Durability) -> Result<()> {
        match self {
            Self::Flat(flat) => flat.link(),
            Self::Qcow2(qcow2) => qcow2.link(extent, data).await,
        }
    }

    /// Gives the extent back: its data was not written. Never waits, so that `drop` can call it.
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
    /// [`flush`](Self::flush) it need not make any other data durable: enough for a write whose
    /// extents are all new, or were written by FUA.
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

    /// The way in which the extents that are prepared now become durable with the fewest
    /// operations. Only advice: both ways are always correct.
    pub fn metadata_sync_mode(&self) -> MetadataSync {
        self.qcow2().map_or(MetadataSync::Flush, Qcow2::metadata_sync_mode)
    }

    /// The image's redo log; `None` without metadata, because then no change is only in the memory
    /// of this process.
    pub fn redo(&self) -> Option<ImageRedo<'_, S>> {
        self.qcow2().map(Qcow2::redo)
    }

    /// Drops all data of the image itself, so that all of it reads as the backing file (or as zeros
    /// without one). Durable when it returns; a crash before leaves some of the data. No request
    /// may be in flight.
    ///
    /// # Errors
    /// `Unsupported` where the format has no backing files; or what the storage answers.
    pub async fn make_empty(&self) -> Result<()> {
        self.qcow2_with("backing file")?.make_empty().await
    }

    /// Brings the image to a state in which another process can open it, with all that was linked:
    /// metadata is written and durable, and no mark says that the image is open. No request may
    /// be in flight. The image stays open, and what it has in memory stays true as long as the
    /// other process changes nothing.
    ///
    /// # Errors
    /// Errors of the storage; a failure to write metadata that is remembered.
    pub async fn settle(&self) -> Result<()> {
        match self.qcow2() {
            Some(qcow2) => qcow2.settle().await,
            None => Ok(()),
        }
    }

    /// Writes the metadata that [`settle`](Self::settle) would write, lazy refcounts included, and
    /// flushes, while requests go on.
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
            Self::Qcow2(qcow2) => qcow2.close().await,
        }
    }
}

/// Refuses an extent that does not start with `range` or exceeds it. Reason: callers split buffers
/// by extents, and a corrupt image must fail only this request.
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
