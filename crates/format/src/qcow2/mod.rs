//! qcow2 images, versions 2 and 3. README.md here has the design; the format is QEMU's
//! `docs/interop/qcow2.txt`.
//!
//! Every value in a file is checked before use: offsets and sizes have bounds, and tables are read
//! into bounded memory. An invalid value is an error that names the structure and its offset.
//!
//! Each component has a folder, and uses only components of lower layers. A component owns its
//! fields; its `mod.rs` describes its life cycle and its locking.
//!
//! | layer | folder | owns |
//! | --- | --- | --- |
//! | 8 | `side_file_header` | nothing: images that have the bitmaps of a raw disk |
//! | 7 | `transaction` | changes of the whole image: snapshots, machine state, size, backing file |
//! | 6 | `bitmaps` | bits of enabled bitmaps, and which of them are on disk |
//! | 5 | `writeback` | the image's lock; running steps; the order in which changes reach the disk |
//! | 4 | `mapping` | changes of guest clusters between prepare and link |
//! | 3 | `allocator` | free space, the reserve, clusters that are about to be freed |
//! | 2 | `tables` | header, L1 table, refcount table, cached slices; which of them are dirty |
//! | 2 | `check` | nothing: images that are not open are checked, repaired, created |
//! | 1 | `layout` | nothing: header, entries, tables as bytes |
//!
//! [`Qcow2`] combines the components and maps the guest's data. Snapshots, VM states, bitmaps, the
//! redo log, the size and the header have handles with their own methods ([`Bitmaps`]).

mod allocator;
mod bitmaps;
mod check;
mod header;
mod layout;
mod mapping;
mod open;
mod room;
mod side_file_header;
mod tables;
mod transaction;
mod writeback;

use blockhouse_core::{
    ByteRange, Durability, Error, ErrorKind, Extent, ExtentState, IoVector, Result, StateMemory,
    Storage, SyncMode, ToolProgress, rare,
};

use crate::{Abort, Intent, MetadataSync};

pub use check::create::{CreateOptions, NewEncryption, Preallocation, create, create_with};
pub use check::finding::{Finding, Refcounts};
pub use check::repair::{REPAIR_PASSES, Repair, RepairReport, repair, repair_with};
pub use check::report::CheckReport;
pub use check::truncation::Truncation;
pub use header::{Features, ImageFacts, Qcow2Header};
pub use layout::bitmap_directory::Bitmap;
pub use layout::compression::{Compression, compress, decompress};
pub use layout::data_file_mark::{DataFileMark, Voucher};
pub use layout::header::EncryptionKind;
pub(crate) use layout::limits::MAX_FILE_NAME;
pub use layout::options::{Access, Backing, BitmapActivity, DataFile, Discard, Switch, Version};
pub use layout::snapshot_table::Snapshot;
pub use open::OpenOptions;
pub use side_file_header::SideFileHeader;
use tables::{Blocked, RedoLog};
pub use transaction::{
    Amendments, BitmapAction, BitmapChange, Bitmaps, ImageRedo, InheritedBits, InternalSnapshots,
    NewBitmap, NewSnapshot, NextChange, Preparation, PreparedChange, Qcow2SizeChange, SnapshotPlan,
    VmStateCluster, VmStateTables, VmStates,
};
pub use writeback::{DataWriteGuard, ReadGuard};

use bitmaps::LiveBitmaps;
pub use bitmaps::{BitmapExtent, BitmapLoss, BitmapLossObserver};
use layout::geometry::Geometry;
use transaction::Transactions;
use writeback::Metadata;

/// A qcow2 image.
pub struct Qcow2<S: Storage> {
    metadata: Metadata<S>,
    transactions: Transactions,
    bitmaps: LiveBitmaps,
    /// The facts that never change while the image is open.
    facts: ImageFacts,
}

/// Checks an image. All its changes must be flushed, and it must not change during the check. The
/// check takes about 6 bytes of memory for each cluster in use (with refcounts of 16 bits),
/// independent of the length of the file.
///
/// # Errors
/// Errors of the storage, or ENOMEM; faults of the image are in the report.
pub async fn check<S: Storage>(image: &Qcow2<S>) -> Result<CheckReport> {
    check_with(image, &ToolProgress::default()).await
}

/// As [`check()`]; `progress` counts tables that were read.
///
/// # Errors
/// As [`check()`].
pub async fn check_with<S: Storage>(
    image: &Qcow2<S>,
    progress: &ToolProgress,
) -> Result<CheckReport> {
    let header = image.metadata.lock().tables.headers.disk().clone();
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

    /// The end of the last cluster, in bytes.
    pub fn end(&self) -> u64 {
        self.size().next_multiple_of(self.geometry().cluster_size())
    }

    /// Bytes of a cluster.
    pub fn cluster_size(&self) -> u64 {
        self.geometry().cluster_size()
    }

    /// Bytes of the guest's allocation unit: a subcluster, or a cluster in an image without
    /// subclusters.
    pub fn subcluster_size(&self) -> u64 {
        self.geometry().subcluster_size()
    }

    /// The facts that never change while the image is open.
    pub fn facts(&self) -> &ImageFacts {
        &self.facts
    }

    /// The image's header on disk.
    pub fn header(&self) -> Qcow2Header<'_, S> {
        Qcow2Header { image: self }
    }

    /// Sets the size of the backing file's disk: past its end, unallocated clusters read as zeros.
    pub fn set_backing_size(&self, size: u64) {
        self.metadata.lock().mapping.set_backing_end(size);
    }

    /// The image file, which has the tables.
    pub fn storage(&self) -> &S {
        self.metadata.storage()
    }

    /// The file to which the host offsets of extents refer: the data file, or the image.
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
        self.begin_unrecorded_change().await?;
        self.map_change(range, intent).await
    }

    /// Prepares a change that bitmaps have recorded or need not record.
    async fn map_change(&self, range: ByteRange, intent: Intent) -> Result<Extent> {
        let mapped = self.metadata.step(|state| match intent {
            Intent::Read => mapping::map_read(&mut state.tables, range),
            Intent::Write => state.thawed_mapper()?.map_write(range),
            Intent::Zero(unmap) => state.thawed_mapper()?.map_zero(range, unmap),
            Intent::Discard => state.thawed_mapper()?.map_discard(range),
        });
        self.metadata.marking(mapped.await).await
    }

    /// As [`Format::map_next`](crate::Format::map_next).
    pub async fn map_next(&self, range: ByteRange) -> Result<Option<Extent>> {
        self.check_data_file()?;
        let range = self.begin_change(range).await?;
        let mapped = self.metadata.step(|state| match state.thawed_mapper()?.map_write(range) {
            Err(Blocked::NoRoom(_)) => Ok(None),
            outcome => outcome.map(Some),
        });
        self.metadata.marking(mapped.await).await
    }

    /// Records a change of `range` in the enabled bitmaps. Returns the first part of `range`, which
    /// was recorded: the caller may change only that part.
    pub(crate) async fn begin_change(&self, range: ByteRange) -> Result<ByteRange> {
        self.begin_changes().await?;
        match self.bitmaps.try_record(range) {
            Some(range) => Ok(range),
            None => rare(self.bitmaps.record(&self.metadata, range)).await,
        }
    }

    /// Prepares for a change that bitmaps do not record.
    pub(crate) async fn begin_unrecorded_change(&self) -> Result<()> {
        self.begin_changes().await?;
        self.bitmaps.begin_session(&self.metadata).await
    }

    /// Prepares for changes.
    async fn begin_changes(&self) -> Result<()> {
        self.metadata.check_writable()?;
        self.metadata.check_intact()?;
        if self.metadata.autoclear().needs_begin_changes() {
            rare(self.metadata.autoclear().begin_changes()).await?;
        }
        Ok(())
    }

    /// As [`CompressedClusters::map`](crate::CompressedClusters::map).
    pub async fn map_compressed(&self, guest: ByteRange, length: u64) -> Result<Extent> {
        self.metadata.check_writable()?;
        if self.geometry().has_data_file {
            let what = "an image with a data file has no compressed clusters";
            return Err(self.error(ErrorKind::Unsupported, what));
        }
        self.metadata.check_intact()?;
        self.metadata.autoclear().begin_changes().await?;
        self.bitmaps.record(&self.metadata, guest).await?;
        let block = u64::from(self.storage().capabilities().alignment.offset);
        let prepared = self
            .metadata
            .step(|state| state.thawed_mapper()?.map_compressed(guest, length, block))
            .await;
        self.metadata.marking(prepared).await
    }

    /// The host offset that is allocated for the first bytes of `range`, or `None`; and the number
    /// of bytes for which this holds (contiguously). The caller has just [mapped](Self::map)
    /// `range` for reading as zeros, a hole or backing, so the guest's bytes are not read from this
    /// host offset.
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
            self.metadata.lock().mapping.track_cow_write(from)
        } else {
            from
        }
    }

    /// As [`Format::link`](crate::Format::link). If the future is dropped before its end, the
    /// extent is aborted.
    pub async fn link(&self, extent: Extent, data: Durability) -> Result<()> {
        let unfinished = LinkGuard { image: self, extent };
        let linked = self.metadata.step(|state| state.mapper().link(extent, data)).await;
        let dropped = self.metadata.marking(linked).await?;
        std::mem::forget(unfinished);
        if !dropped.is_empty() {
            self.metadata.free_clusters(dropped).await;
        }
        Ok(())
    }

    /// As [`Format::abort`](crate::Format::abort).
    pub fn abort(&self, extent: Extent, why: Abort) {
        self.metadata.lock().mapper().abort(extent, why);
    }

    /// Refuses to map data in a data file that is not open.
    fn check_data_file(&self) -> Result<()> {
        if self.geometry().has_data_file && self.metadata.writer().data_file().is_none() {
            let what = "the image keeps its data in a data file, which is not open";
            return Err(self.error(ErrorKind::Unsupported, what));
        }
        Ok(())
    }

    /// Refuses an extent that begins past the end of the data file. A data file that is the raw
    /// disk may be shorter than the disk, because other programs change the file.
    fn within_data_file(&self, extent: Extent) -> Result<Extent> {
        if let (Some(data), ExtentState::Mapped { host }) =
            (self.metadata.writer().data_file(), extent.state)
            && !self.facts.has_raw_disk()
            && self.geometry().cluster_of(host) >= self.geometry().clusters_for(data.size())
        {
            let what = "the data file ends before this cluster of the guest";
            return Err(Error::new(ErrorKind::Corrupt, what).on(data.name()).at(host));
        }
        Ok(extent)
    }
}

/// A link in progress: dropping it aborts the extent.
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
        self.metadata.metadata_sync_mode()
    }
}

/// The number of changes in `log` that may be missing on disk: [`ImageRedo::replay`] would examine
/// these changes. For messages, and to decide whether the memory is still needed. 0 for memory
/// without a log.
pub fn redo_log_len(log: &dyn StateMemory) -> u64 {
    RedoLog::count(log)
}
