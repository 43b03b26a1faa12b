//! qcow2 images, versions 2 and 3. README.md here has the design; the format is QEMU's
//! `docs/interop/qcow2.txt`.
//!
//! Nothing in a file is believed before it was checked: every offset and size is bounded before it
//! is used, tables are read into bounded memory, and what is wrong is an error that names the
//! structure and its offset.
//!
//! Components, each in a folder that uses only those of lower floors. A component owns its fields;
//! its page tells its life cycle and its locking.
//!
//! | floor | folder | owns |
//! | --- | --- | --- |
//! | 7 | `sidecar` | nothing: images that hold the bitmaps of a raw disk |
//! | 6 | `transaction` | changes of the image as a whole: snapshots, machine state, size, backing file |
//! | 5 | `bitmaps` | bits of enabled bitmaps, and what of them is on disk |
//! | 4 | `writeback` | the image's lock; running steps; the order in which changes reach the disk |
//! | 4 | `mapping` | changes of guest clusters between prepare and link |
//! | 3 | `allocator` | free space, the reserve, clusters on their way to be free |
//! | 2 | `tables` | header, L1 table, refcount table, cached slices; what of them is dirty |
//! | 2 | `check` | nothing: images that are not open are checked, repaired, created |
//! | 1 | `layout` | nothing: header, entries, tables as bytes |
//!
//! [`Qcow2`] holds them together: each of its methods checks what a caller may do, and asks a
//! component.

mod allocator;
mod bitmaps;
mod check;
mod layout;
mod mapping;
mod open;
mod room;
mod sidecar;
mod tables;
mod transaction;
mod writeback;

use std::sync::Arc;

use blockhouse_core::{
    ByteRange, Durability, Error, ErrorKind, Extent, ExtentFlags, ExtentState, IoVector, Result,
    StateMemory, Storage, SyncMode, ToolProgress,
};

use crate::{Abort, Intent, MetadataSync, Replay};

pub use check::create::{CreateOptions, Preallocation, create, create_with};
pub use check::finding::Finding;
pub use check::repair::{REPAIR_PASSES, Repair, RepairReport, repair, repair_with};
pub use check::report::CheckReport;
pub use check::truncation::Truncation;
pub use layout::bitmap_directory::Bitmap;
pub use layout::compression::{Compression, compress, decompress};
pub use layout::data_file_mark::{DataFileMark, Voucher};
pub use layout::options::{Access, Backing, BitmapActivity, DataFile, Discard, Switch, Version};
pub use layout::snapshot_table::Snapshot;
pub use open::{Features, OpenOptions};
pub use sidecar::Sidecar;
pub(crate) use tables::REDO_LOG_WORDS;
use tables::{Blocked, RedoLog};
pub use transaction::{
    Amendments, BitmapAction, BitmapChange, InheritedBits, NewBitmap, NewSnapshot, NextChange,
    Preparation, PreparedChange, SnapshotPlan, VmStateCluster, VmStateTables,
};
pub use writeback::{DataWriteGuard, ReadGuard};

use bitmaps::LiveBitmaps;
pub use bitmaps::{BitmapExtent, BitmapLossObserver};
use layout::geometry::Geometry;
use layout::header::SESSION;
use transaction::{ImageMetadata, Transactions, mapper, thawed_mapper};

/// A qcow2 image.
pub struct Qcow2<S: Storage> {
    metadata: ImageMetadata<S>,
    transactions: Transactions,
    bitmaps: LiveBitmaps,
    /// The facts that never change while the image is open.
    facts: Facts,
}

/// The image's description, and the findings when it was opened.
struct Facts {
    compression: Compression,
    backing: Option<Backing>,
    data_file: Option<DataFile>,
    /// Where the keys are, if the guest's data is encrypted.
    encryption: Option<ByteRange>,
    truncation: Option<Truncation>,
    /// Whether it is a [`Sidecar`].
    is_sidecar: bool,
    /// The snapshot that it was opened on.
    snapshot: Option<Snapshot>,
}

/// Checks an image that does not change meanwhile and whose changes are all flushed. Takes about 6
/// bytes of memory for each cluster in use (with refcounts of 16 bits), however long the file is.
///
/// # Errors
/// What the storage answers, or ENOMEM: what is wrong with the image is in the report.
pub async fn check<S: Storage>(image: &Qcow2<S>) -> Result<CheckReport> {
    check_with(image, &ToolProgress::default()).await
}

/// As [`check()`]; `progress` tells of tables that were read.
///
/// # Errors
/// As there.
pub async fn check_with<S: Storage>(
    image: &Qcow2<S>,
    progress: &ToolProgress,
) -> Result<CheckReport> {
    let header = image.metadata.lock().tables.headers().disk().clone();
    check::report::check_tables(image.storage(), &header, progress).await
}

/// The properties of an image.
impl<S: Storage> Qcow2<S> {
    fn geometry(&self) -> Geometry {
        self.metadata.geometry()
    }

    /// The size of the guest's disk in bytes, a multiple of 512.
    pub fn size(&self) -> u64 {
        self.metadata.size()
    }

    /// Where the last cluster ends.
    pub fn end(&self) -> u64 {
        self.size().next_multiple_of(self.geometry().cluster_size())
    }

    /// Bytes of a cluster.
    pub fn cluster_size(&self) -> u64 {
        self.geometry().cluster_size()
    }

    /// Bytes of what is allocated to the guest at a time: a subcluster, or a cluster where there
    /// are none.
    pub fn subcluster_size(&self) -> u64 {
        self.geometry().subcluster_size()
    }

    /// How the image's clusters are compressed.
    pub fn compression(&self) -> Compression {
        self.facts.compression
    }

    /// The backing file, where unallocated clusters are read from; what lies past its end reads as
    /// zeros.
    pub fn backing(&self) -> Option<&Backing> {
        self.facts.backing.as_ref()
    }

    /// Says how long the backing file is: past its end it reads as zeros.
    pub fn set_backing_size(&self, size: u64) {
        self.metadata.lock().changes.set_backing_end(size);
    }

    /// The file that holds the guest's clusters, if the image does not.
    pub fn data_file(&self) -> Option<&DataFile> {
        self.facts.data_file.as_ref()
    }

    /// The whole clusters with the header of LUKS; `None` where the guest's data is not encrypted.
    pub fn encryption(&self) -> Option<ByteRange> {
        self.facts.encryption
    }

    /// Whether the data file reads as the disk, and so has each cluster allocated.
    pub fn is_raw_disk(&self) -> bool {
        self.data_file().is_some_and(DataFile::is_raw_disk)
    }

    /// The image's description of its data file, if it is a [`Sidecar`].
    pub fn sidecar_mark(&self) -> Option<DataFileMark> {
        DataFileMark::of(self.metadata.lock().tables.headers().disk())
    }

    /// Whether it is a [`Sidecar`]: the disk is the data file, byte for byte, and no change of it
    /// concerns the tables.
    pub fn is_sidecar(&self) -> bool {
        self.facts.is_sidecar
    }

    /// The extent of a range of a sidecar's disk; `None` of other images, and of what is not yet a
    /// part of the disk, for which the tables get their entries.
    fn fixed_extent(&self, range: ByteRange) -> Option<Extent> {
        let is_fixed = self.facts.is_sidecar && range.end() <= self.size();
        let state = ExtentState::Mapped { host: range.offset() };
        let flags = ExtentFlags::FIXED;
        is_fixed.then_some(Extent { guest: range, alloc_range: range, state, flags })
    }

    /// The losses of the file that were found when the image was opened, for reading: reads of them
    /// fail.
    pub fn truncation(&self) -> Option<Truncation> {
        self.facts.truncation
    }

    /// The image itself, where its tables are.
    pub fn storage(&self) -> &S {
        self.metadata.storage()
    }

    /// Where the host offsets of extents point to: the data file, or the image.
    pub fn data(&self) -> &S {
        self.metadata.writer().data_file().unwrap_or(self.storage())
    }

    fn error(&self, kind: ErrorKind, what: impl Into<String>) -> Error {
        Error::new(kind, what.into()).on(self.storage().name())
    }
}

/// The guest's data.
impl<S: Storage> Qcow2<S> {
    /// As [`Format::map`](crate::Format::map).
    pub async fn map(&self, range: ByteRange, intent: Intent) -> Result<Extent> {
        self.check_data_file()?;
        if intent == Intent::Read {
            if let Some(extent) = self.fixed_extent(range) {
                return Ok(extent);
            }
            let mapped =
                self.metadata.step(|state| mapping::map_read(&mut state.tables, range)).await;
            return self.within_data_file(self.metadata.marking(mapped).await?);
        }
        let range = self.begin_change(range).await?;
        self.map_change(range, intent).await
    }

    /// As [`Format::map_same_content`](crate::Format::map_same_content).
    pub async fn map_same_content(&self, range: ByteRange, intent: Intent) -> Result<Extent> {
        self.check_data_file()?;
        self.begin_changes().await?;
        self.bitmaps.begin_session(&self.metadata).await?;
        self.map_change(range, intent).await
    }

    /// Prepares a change that bitmaps know of.
    async fn map_change(&self, range: ByteRange, intent: Intent) -> Result<Extent> {
        if let Some(extent) = self.fixed_extent(range) {
            return Ok(extent);
        }
        let mapped = self.metadata.step(|state| match intent {
            Intent::Read => mapping::map_read(&mut state.tables, range),
            Intent::Write => thawed_mapper(state)?.map_write(range),
            Intent::Zero(unmap) => thawed_mapper(state)?.map_zero(range, unmap),
            Intent::Discard => thawed_mapper(state)?.map_discard(range),
        });
        self.metadata.marking(mapped.await).await
    }

    /// As [`Format::map_next`](crate::Format::map_next).
    pub async fn map_next(&self, range: ByteRange) -> Result<Option<Extent>> {
        self.check_data_file()?;
        let range = self.begin_change(range).await?;
        if let Some(extent) = self.fixed_extent(range) {
            return Ok(Some(extent));
        }
        let mapped = self.metadata.step(|state| match thawed_mapper(state)?.map_write(range) {
            Err(Blocked::NoRoom(_)) => Ok(None),
            outcome => outcome.map(Some),
        });
        self.metadata.marking(mapped.await).await
    }

    /// The preparation of a change of `range`; the part of it that may be prepared then.
    async fn begin_change(&self, range: ByteRange) -> Result<ByteRange> {
        self.begin_changes().await?;
        match self.bitmaps.try_record(range) {
            Some(range) => Ok(range),
            None => Box::pin(self.bitmaps.record(&self.metadata, range)).await,
        }
    }

    /// The preparation of changes.
    async fn begin_changes(&self) -> Result<()> {
        self.metadata.check_writable()?;
        self.metadata.check_intact()?;
        if self.metadata.needs_begin_changes() {
            Box::pin(self.metadata.begin_changes()).await?;
        }
        Ok(())
    }

    /// As [`Format::map_compressed`](crate::Format::map_compressed).
    pub async fn map_compressed(&self, guest: ByteRange, length: u64) -> Result<Extent> {
        self.metadata.check_writable()?;
        if self.geometry().has_data_file {
            let what = "an image with a data file has no compressed clusters";
            return Err(self.error(ErrorKind::Unsupported, what));
        }
        self.metadata.check_intact()?;
        self.metadata.begin_changes().await?;
        self.bitmaps.record(&self.metadata, guest).await?;
        let block = u64::from(self.storage().capabilities().alignment.offset);
        let prepared = self
            .metadata
            .step(|state| thawed_mapper(state)?.map_compressed(guest, length, block))
            .await;
        self.metadata.marking(prepared).await
    }

    /// The host offset of the first bytes of `range` although their content does not come from
    /// there, `None` for none; and for how many bytes that holds, contiguously. `range` is one
    /// that [`map`](Self::map) answered for reading as zeros, a hole or the backing file's.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    pub async fn preallocated_offset(&self, range: ByteRange) -> Result<(Option<u64>, u64)> {
        self.metadata.step(|state| mapping::preallocated_offset(&mut state.tables, range)).await
    }

    /// As [`Format::begin_read`](crate::Format::begin_read).
    pub fn begin_read(&self) -> ReadGuard<'_> {
        self.metadata.begin_read()
    }

    /// As [`Format::reads_ended`](crate::Format::reads_ended).
    pub async fn reads_ended(&self) {
        self.metadata.reads_ended().await;
    }

    /// As [`Format::begin_data_write`](crate::Format::begin_data_write).
    pub fn begin_data_write(&self) -> DataWriteGuard<'_> {
        self.metadata.begin_data_write()
    }

    /// As [`Format::track_cow_write`](crate::Format::track_cow_write).
    pub fn track_cow_write(&self, from: IoVector) -> IoVector {
        if self.geometry().has_data_file {
            self.metadata.lock().changes.track_cow_write(from)
        } else {
            from
        }
    }

    /// As [`Format::link`](crate::Format::link). Dropped before its end, it is an abort.
    pub async fn link(&self, extent: Extent, data: Durability) -> Result<()> {
        let unfinished = LinkGuard { image: self, extent };
        let linked = self.metadata.step(|state| mapper(state).link(extent, data)).await;
        let dropped = self.metadata.marking(linked).await?;
        std::mem::forget(unfinished);
        if !dropped.is_empty() {
            self.metadata.free_clusters(dropped).await;
        }
        Ok(())
    }

    /// As [`Format::abort`](crate::Format::abort).
    pub fn abort(&self, extent: Extent, why: Abort) {
        mapper(&mut self.metadata.lock()).abort(extent, why);
    }

    /// Refuses to map what lies in a file that is not open.
    fn check_data_file(&self) -> Result<()> {
        if self.geometry().has_data_file && self.metadata.writer().data_file().is_none() {
            let what = "the image keeps its data in a data file, which is not open";
            return Err(self.error(ErrorKind::Unsupported, what));
        }
        Ok(())
    }

    /// An extent in a data file must begin before its end. A data file that is the raw disk may be
    /// shorter: others change it.
    fn within_data_file(&self, extent: Extent) -> Result<Extent> {
        if let (Some(data), ExtentState::Mapped { host }) =
            (self.metadata.writer().data_file(), extent.state)
            && !self.is_raw_disk()
            && self.geometry().cluster_of(host) >= self.geometry().clusters_for(data.size())
        {
            let what = "the data file ends before this cluster of the guest";
            return Err(Error::new(ErrorKind::Corrupt, what).on(data.name()).at(host));
        }
        Ok(extent)
    }
}

/// A link that has not ended.
struct LinkGuard<'a, S: Storage> {
    image: &'a Qcow2<S>,
    extent: Extent,
}

impl<S: Storage> Drop for LinkGuard<'_, S> {
    fn drop(&mut self) {
        self.image.abort(self.extent, Abort::Ended);
    }
}

/// Durability.
impl<S: Storage> Qcow2<S> {
    /// As [`Format::flush`](crate::Format::flush).
    pub async fn flush(&self, sync: SyncMode) -> Result<()> {
        self.metadata.flush(sync).await
    }

    /// As [`Format::sync_metadata`](crate::Format::sync_metadata).
    pub async fn sync_metadata(&self) -> Result<()> {
        self.metadata.sync_metadata().await
    }

    /// As [`Format::sync_data_and_metadata`](crate::Format::sync_data_and_metadata).
    pub async fn sync_data_and_metadata(&self) -> Result<()> {
        self.metadata.sync_data_and_metadata().await
    }

    /// As [`Format::metadata_sync_mode`](crate::Format::metadata_sync_mode).
    pub fn metadata_sync_mode(&self) -> MetadataSync {
        self.metadata.metadata_sync_mode(mapping::Mapping::pending_changes)
    }
}

/// How many changes `log` has of which the disk may know nothing: what
/// [`Format::replay`](crate::Format::replay) would look at. For people, and for who decides whether
/// the memory is still needed. 0 for memory that holds no log.
pub fn redo_log_len(log: &dyn StateMemory) -> u64 {
    RedoLog::count(log)
}

/// The state that outlives the process.
impl<S: Storage> Qcow2<S> {
    /// As [`Format::replay`](crate::Format::replay).
    pub async fn replay(&self, log: &dyn StateMemory) -> Result<Replay> {
        self.check_data_file()?;
        transaction::replay(&self.metadata, log).await
    }

    /// As [`Format::attach_redo_log`](crate::Format::attach_redo_log).
    pub fn attach_redo_log(&self, log: Arc<dyn StateMemory>) {
        self.metadata.attach_redo_log(log);
    }

    /// Whether the header has the mark of a process that keeps a redo log, or died.
    pub fn has_session_bit(&self) -> bool {
        self.metadata.lock().tables.headers().disk().autoclear & SESSION != 0
    }
}

/// Persistent bitmaps.
impl<S: Storage> Qcow2<S> {
    /// All bitmaps, in the order in which they were added; none where another program has changed
    /// the disk without recording its changes in them.
    ///
    /// # Errors
    /// `Corrupt` where the directory contradicts the format.
    pub async fn bitmaps(&self) -> Result<Vec<Bitmap>> {
        let mut bitmaps = transaction::list_bitmaps(&self.metadata).await?;
        for bitmap in bitmaps.iter_mut().filter(|bitmap| bitmap.is_inconsistent) {
            bitmap.lacks_since = self.bitmaps.lost_at(&bitmap.name);
        }
        Ok(bitmaps)
    }

    /// Has `observer` told of each bitmap that has to be given up from now on. Only the first
    /// observer of an image is.
    pub fn observe_bitmap_losses(&self, observer: BitmapLossObserver) {
        self.bitmaps.observe_losses(observer);
    }

    /// Whether the image has bitmaps that are in step with the disk. Of an image that is open for
    /// writing.
    pub fn has_bitmaps(&self) -> bool {
        self.bitmaps.has_any()
    }

    /// As [`Format::vouch_by`](crate::Format::vouch_by).
    pub fn vouch_by(&self, vouch: fn() -> Option<Voucher>) {
        self.bitmaps.vouch_by(vouch);
    }

    /// As [`Format::renew_voucher`](crate::Format::renew_voucher).
    pub async fn renew_voucher(&self) -> Result<()> {
        self.bitmaps.renew_voucher(&self.metadata).await
    }

    /// Up to how many bytes of the disk each enabled bitmap may say to have changed that have not,
    /// because a process died that recorded changes in it; 0 where none did. Of an image that
    /// is open for writing.
    pub fn bitmap_excess(&self) -> u64 {
        self.bitmaps.excess(&self.metadata)
    }

    /// The record of the bitmap of this name for `range`, which lies inside the disk: extents that
    /// follow each other, `max` at least unless there are fewer. An enabled bitmap of an image
    /// that is open for writing says what was recorded up to now.
    ///
    /// # Errors
    /// `InvalidInput` where there is no such bitmap, or where it is inconsistent; `Corrupt`; or
    /// what the storage answers.
    pub async fn bitmap_extents(
        &self,
        name: &str,
        range: ByteRange,
        max: usize,
    ) -> Result<Vec<BitmapExtent>> {
        transaction::bitmap_extents(&self.metadata, &self.bitmaps, name, range, max).await
    }

    /// Has the enabled bitmaps say that `range` changes, though nothing is written to it; durable
    /// when it returns. One in which that cannot be recorded is given up, as by a change.
    ///
    /// # Errors
    /// What the storage answers.
    pub async fn record_change(&self, range: ByteRange) -> Result<()> {
        let mut rest = range;
        while !rest.is_empty() {
            let recorded = self.bitmaps.record(&self.metadata, rest).await?;
            rest = rest.skip(recorded.length());
        }
        Ok(())
    }

    /// Adds a bitmap without any change in it; durable when it returns. No change of the guest's
    /// data may be in flight.
    ///
    /// # Errors
    /// `InvalidInput` for a name that is taken, empty or too long, a granularity that the format
    /// does not have or that makes too large a bitmap, or a header without room; `Unsupported`
    /// for version 2; `NoSpace`; or what the storage answers. Nothing has changed then.
    pub async fn add_bitmap(&self, new: &NewBitmap) -> Result<()> {
        transaction::add_bitmap(&self.metadata, &self.transactions, &self.bitmaps, new).await
    }

    /// Changes the bitmap of this name; durable when it returns. No change of the guest's data may
    /// be in flight.
    ///
    /// # Errors
    /// `InvalidInput` where there is none, or where it is inconsistent and not to be removed; or as
    /// [`add_bitmap`](Self::add_bitmap).
    pub async fn change_bitmap(&self, name: &str, action: BitmapAction) -> Result<()> {
        let (transactions, live) = (&self.transactions, &self.bitmaps);
        transaction::change_bitmap(&self.metadata, transactions, live, name, action).await
    }

    /// Makes changes of bitmaps, all of them or none; durable when it returns. `prepared` is
    /// awaited when all is written, before the changes become effective; where it fails, none
    /// is made. No change of the guest's data may be in flight.
    ///
    /// # Errors
    /// As [`add_bitmap`](Self::add_bitmap) and [`change_bitmap`](Self::change_bitmap), or that of
    /// `prepared`.
    pub async fn change_bitmaps(
        &self,
        changes: &[BitmapChange],
        prepared: impl AsyncFnOnce() -> Result<()>,
    ) -> Result<()> {
        let (transactions, live) = (&self.transactions, &self.bitmaps);
        transaction::change_bitmaps(&self.metadata, transactions, live, changes, prepared).await
    }

    /// Adds what the bitmap `source_name` of `source`, which may be this image, has recorded to the
    /// bitmap `name`, whose granularity may be another one; durable when it returns. No change
    /// of the guest's data may be in flight.
    ///
    /// # Errors
    /// `InvalidInput` for disks of different sizes; or as [`change_bitmap`](Self::change_bitmap).
    pub async fn merge_bitmap(&self, name: &str, source: &Self, source_name: &str) -> Result<()> {
        let source = (&source.metadata, source_name);
        let (transactions, live) = (&self.transactions, &self.bitmaps);
        transaction::merge_bitmap(&self.metadata, transactions, live, name, source).await
    }

    /// Has the bitmaps of these names, which `source` has, go on in this image, with their
    /// granularity and state; durable when it returns. What ones of these names said here is
    /// replaced. No change of the guest's data may be in flight, and of `source` none from then
    /// on, unless `bits` say that all has changed or the bitmaps are disabled.
    ///
    /// # Errors
    /// `InvalidInput` for disks of different sizes; or as [`merge_bitmap`](Self::merge_bitmap).
    pub async fn inherit_bitmaps(
        &self,
        source: &Self,
        names: &[String],
        bits: InheritedBits<'_>,
    ) -> Result<()> {
        let ours = (&self.transactions, &self.bitmaps);
        transaction::inherit_bitmaps(&self.metadata, ours, &source.metadata, names, bits).await
    }
}

/// The image as a whole.
impl<S: Storage> Qcow2<S> {
    /// As [`Format::check_resize`](crate::Format::check_resize).
    pub fn check_resize(&self, size: u64) -> Result<()> {
        transaction::check_resize(&self.metadata, size)?;
        self.metadata.writer().data_file().map_or(Ok(()), |data| data.check_size(size))
    }

    /// As [`Format::prepare_resize`](crate::Format::prepare_resize).
    pub async fn prepare_resize(&self, from: u64, size: u64) -> Result<()> {
        transaction::prepare_resize(&self.metadata, from, size).await
    }

    /// As [`Format::resize`](crate::Format::resize), to a larger size only. What lies past the old
    /// end in the last cluster or in the backing file becomes visible, unless it was made zeros
    /// before.
    pub async fn resize(&self, size: u64) -> Result<()> {
        transaction::grow(&self.metadata, (&self.transactions, &self.bitmaps), size).await?;
        self.bitmaps.note_resize(&self.metadata).await
    }

    /// As [`Format::shrink`](crate::Format::shrink).
    pub async fn shrink(&self, size: u64) -> Result<()> {
        transaction::shrink(&self.metadata, (&self.transactions, &self.bitmaps), size).await?;
        self.bitmaps.note_resize(&self.metadata).await
    }

    /// As [`Format::make_empty`](crate::Format::make_empty).
    pub async fn make_empty(&self) -> Result<()> {
        transaction::make_empty(&self.metadata).await
    }

    /// Gives the image another backing file or none, durably. What [`backing`](Self::backing)
    /// answers stays what it was when the image was opened; the image is to be closed after
    /// this. That the new file has the content that the image relies on is the caller's
    /// business.
    ///
    /// # Errors
    /// `InvalidInput` for a name that is empty, too long, or for which the header has no room; or
    /// what the storage answers.
    pub async fn set_backing(&self, backing: Option<Backing>) -> Result<()> {
        transaction::set_backing(&self.metadata, backing).await
    }

    /// Changes options of the image, durably: the old ones or the new ones are in force after a
    /// crash. What [`features`](Self::features) answers is new, all else is as it was when the
    /// image was opened; the image is to be closed after this.
    ///
    /// # Errors
    /// `Unsupported` for what cannot be changed in place; `InvalidInput` where the header has no
    /// room, or the options contradict each other; `ReadOnly`; `NoSpace`; or what the storage
    /// answers.
    pub async fn amend(&self, amendments: Amendments) -> Result<()> {
        transaction::amend(&self.metadata, &self.transactions, amendments).await
    }

    /// All snapshots, in the order in which they were taken.
    ///
    /// # Errors
    /// `Corrupt` where the table contradicts the format; why it is unknown which table is active,
    /// after a change of it failed at its last step.
    pub async fn snapshots(&self) -> Result<Vec<Snapshot>> {
        transaction::list_snapshots(&self.metadata).await
    }

    /// Takes a snapshot of the guest's disk, with a machine's state if one is given; durable when
    /// it returns. No change of the guest's data may be in flight.
    ///
    /// # Errors
    /// `InvalidInput` for a name that is taken, empty or too long; `Unsupported` when refcounts
    /// cannot count so far, or when the image has a data file; `NoSpace`; or what the storage
    /// answers. Nothing has changed then, and `vm_state` is as it was.
    pub async fn create_snapshot(
        &self,
        new: &NewSnapshot,
        vm_state: Option<&VmStateTables>,
    ) -> Result<Snapshot> {
        transaction::create_snapshot(&self.metadata, &self.transactions, new, vm_state).await
    }

    /// As [`Snapshots::prepare`](crate::Snapshots::prepare).
    pub async fn prepare_change(&self, plan: SnapshotPlan) -> Result<PreparedChange<'_, S>> {
        transaction::prepare_change(&self.metadata, &self.transactions, plan).await
    }

    /// As [`Snapshots::give_back`](crate::Snapshots::give_back).
    pub async fn give_back(&self) {
        // A failure is recorded where it has to be; the rest is freed later.
        if self.metadata.reclaim().await.is_ok() {
            let _ = self.metadata.write_back_all().await;
        }
    }

    /// Makes the disk what it was when the snapshot was taken, its size included; durable when it
    /// returns. No change of the guest's data may be in flight. What was written since is gone.
    ///
    /// # Errors
    /// As [`create_snapshot`](Self::create_snapshot); `InvalidInput` for an unknown name.
    pub async fn apply_snapshot(&self, name: &str) -> Result<()> {
        transaction::apply_snapshot(&self.metadata, &self.transactions, &self.bitmaps, name).await
    }

    /// Deletes a snapshot; durable when it returns. No change of the guest's data may be in flight.
    ///
    /// # Errors
    /// As [`apply_snapshot`](Self::apply_snapshot).
    pub async fn delete_snapshot(&self, name: &str) -> Result<()> {
        transaction::delete_snapshot(&self.metadata, &self.transactions, name).await
    }

    /// Gives a snapshot another name; durable when it returns.
    ///
    /// # Errors
    /// As [`create_snapshot`](Self::create_snapshot); `InvalidInput` for an unknown name.
    pub async fn rename_snapshot(&self, name: &str, new_name: &str) -> Result<()> {
        transaction::rename_snapshot(&self.metadata, &self.transactions, name, new_name).await
    }

    /// Refuses snapshots, whose disks share clusters: in a data file each guest cluster has one
    /// host offset.
    ///
    /// # Errors
    /// `Unsupported` for an image with a data file.
    pub fn check_sharing(&self) -> Result<()> {
        transaction::check_no_data_file(&self.metadata)
    }

    /// Where the machine's state begins in the tables of a snapshot of this disk: after the disk,
    /// at a whole L1 entry.
    pub fn vm_state_offset(&self) -> u64 {
        self.geometry().l1_entries_for(self.size()) * self.geometry().l1_entry_span()
    }

    /// Where the state is of the snapshot that the image was opened on; empty for a snapshot
    /// without one.
    ///
    /// # Errors
    /// `InvalidInput` for an image that was not opened on a snapshot; `Corrupt` where the
    /// snapshot's tables do not reach so far; `Unsupported` for an image with a data file.
    pub fn vm_state(&self) -> Result<ByteRange> {
        let snapshot = self.facts.snapshot.as_ref();
        transaction::vm_state_location(&self.metadata, snapshot, self.vm_state_offset())
    }

    /// Tables for a state of which nothing is stored yet.
    pub fn new_vm_state(&self) -> VmStateTables {
        VmStateTables::new(self.metadata.lock().tables.header(), self.size())
    }

    /// Allocates one to `limit` clusters in a row for a machine's state. Nothing refers to them:
    /// they are to be [reserved](VmStateTables::reserve) or given back.
    ///
    /// # Errors
    /// `NoSpace`, `ReadOnly`, or why tables cannot be written; `Unsupported` for an image with a
    /// data file.
    pub async fn allocate_clusters(&self, limit: u64) -> Result<ByteRange> {
        transaction::allocate_clusters(&self.metadata, limit).await
    }

    /// Gives clusters back that nothing refers to and nothing writes to. Never waits.
    pub fn free_clusters(&self, range: ByteRange) {
        let mut state = self.metadata.lock();
        let state = &mut *state;
        state.allocator.free_unlinked(&mut state.tables, self.geometry().clusters_of(range));
    }
}
