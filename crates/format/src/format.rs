//! The questions of the I/O path to an image format.
//!
//! [`Format`] is the one place that knows the formats by name; the layers above only ask it. What
//! they ask about an image (has it clusters, a backing file, snapshots) is in `describe` and
//! `snapshots`.
//!
//! Writing goes in three steps, so that no crash shows a mapping without its data: `map` prepares
//! an extent, the path moves the data, `link` makes the extent visible (or `abort` gives it back).
//! A format relies on its caller for order: two writes of the same guest bytes may be in flight
//! together only where they need no space of their own.

use std::sync::Arc;

use blockhouse_core::{
    ByteRange, Durability, Error, ErrorKind, Extent, ExtentFlags, IoVector, Result, StateMemory,
    Storage, SyncMode,
};

use crate::qcow2::{self, DataWriteGuard, ReadGuard};
use crate::{Abort, Amendments, Backing, Foreign, Intent, Luks, MetadataSync, Qcow2, Raw, Replay};

/// An image format over the storage that holds the image. Closed: the path has one arm for each
/// state of an extent, not one for each format. The [crate's page](crate) has an example.
pub enum Format<S: Storage> {
    /// The image is the disk, byte for byte.
    Raw(Raw<S>),
    /// The disk lies encrypted behind a header.
    Luks(Box<Luks<S>>),
    /// Tables say where the guest's clusters are.
    Qcow2(Box<Qcow2<S>>),
    /// An image of another program, for reading only.
    Foreign(Box<Foreign<S>>),
}

impl<S: Storage> Format<S> {
    /// The size of the guest's disk in bytes, a multiple of 512.
    pub fn size(&self) -> u64 {
        match self {
            Self::Raw(raw) => raw.size(),
            Self::Luks(luks) => luks.size(),
            Self::Qcow2(qcow2) => qcow2.size(),
            Self::Foreign(foreign) => foreign.size(),
        }
    }

    /// Where the last byte that has a place ends: at least [`size`](Self::size), and beyond it
    /// where the format allocates in larger units. Block-aligned operations stop here.
    pub fn end(&self) -> u64 {
        match self {
            Self::Raw(raw) => raw.size(),
            Self::Luks(luks) => luks.size(),
            Self::Qcow2(qcow2) => qcow2.end(),
            Self::Foreign(foreign) => foreign.size(),
        }
    }

    /// The image itself.
    pub fn storage(&self) -> &S {
        match self {
            Self::Raw(raw) => raw.storage(),
            Self::Luks(luks) => luks.storage(),
            Self::Qcow2(qcow2) => qcow2.storage(),
            Self::Foreign(foreign) => foreign.storage(),
        }
    }

    /// Where the host offsets of extents point to: the image, or its data file.
    pub fn data(&self) -> &S {
        match self {
            Self::Raw(raw) => raw.storage(),
            Self::Luks(luks) => luks.storage(),
            Self::Qcow2(qcow2) => qcow2.data(),
            Self::Foreign(foreign) => foreign.data(),
        }
    }

    /// Attaches a guard to the memory of a write that carries copy-on-write padding (an extent
    /// whose `whole` is more than its `guest`): so the format learns when the write has ended,
    /// also where its future was dropped.
    #[must_use]
    pub fn track_cow_write(&self, from: IoVector) -> IoVector {
        match self {
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => from,
            Self::Qcow2(qcow2) => qcow2.track_cow_write(from),
        }
    }

    /// The place of the first bytes of `range`: an extent that starts where `range` does, is not
    /// empty and does not reach beyond it. Its host offset is as well aligned as its guest offset,
    /// up to the storage's alignment.
    ///
    /// `range` must not be empty, must lie before [`end`](Self::end), and for all intents but
    /// `Read` must be aligned as the storage demands (or stop at the end). Every extent of those
    /// intents is handed back by exactly one of [`link`](Self::link) and
    /// [`abort`](Self::abort).
    pub async fn map(&self, range: ByteRange, intent: Intent) -> Result<Extent> {
        let extent = match self {
            Self::Raw(raw) => return Ok(raw.map(range, intent)),
            Self::Luks(luks) => return Ok(luks.map(range)),
            Self::Qcow2(qcow2) => qcow2.map(range, intent).await?,
            Self::Foreign(foreign) => foreign.map(range, intent).await?,
        };
        self.check_extent(range, intent, extent)
    }

    /// Refuses an extent that is not what was asked for. All that use it cut buffers by it: where
    /// an image leads the mapping astray, that one request fails.
    fn check_extent(&self, range: ByteRange, intent: Intent, extent: Extent) -> Result<Extent> {
        let Extent { guest, alloc_range, .. } = extent;
        let is_first = guest.offset() == range.offset() && !guest.is_empty();
        if is_first && range.contains(guest) && alloc_range.contains(guest) {
            return Ok(extent);
        }
        if intent != Intent::Read {
            self.abort(extent, Abort::Ended);
        }
        let what = format!("the {} mapping answers {extent:?} for {range}", self.name());
        Err(Error::new(ErrorKind::Corrupt, what).on(self.storage().name()).at(range.offset()))
    }

    /// As [`map`](Self::map), for a change after which the disk reads what it did before: bitmaps
    /// do not record it.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    pub async fn map_same_content(&self, range: ByteRange, intent: Intent) -> Result<Extent> {
        match self {
            Self::Qcow2(qcow2) => qcow2.map_same_content(range, intent).await,
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => self.map(range, intent).await,
        }
    }

    /// As [`map`](Self::map) for a write, by a request that holds extents whose writes have not
    /// begun. `None` where it would have to wait until others hand their extents back: they may
    /// be waiting for those of this request.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    pub async fn map_next(&self, range: ByteRange) -> Result<Option<Extent>> {
        match self {
            Self::Qcow2(qcow2) => qcow2.map_next(range).await,
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => {
                self.map(range, Intent::Write).await.map(Some)
            }
        }
    }

    /// A place for the compressed form of one guest cluster, `length` bytes: an extent that is
    /// `NEW` and `Compressed`, whose length may be more than was asked for (the rest is padding
    /// of any content). It starts and ends as the storage's alignment demands.
    ///
    /// `guest` is the whole cluster, or ends with the disk; `length`, rounded up to the storage's
    /// alignment, is less than a cluster. Handed back by exactly one of [`link`](Self::link) and
    /// [`abort`](Self::abort), as those of [`map`](Self::map).
    ///
    /// # Errors
    /// `Unsupported` where the format has no compressed clusters; or what [`map`](Self::map)
    /// answers a write.
    pub async fn map_compressed(&self, guest: ByteRange, length: u64) -> Result<Extent> {
        match self {
            Self::Luks(luks) => Err(luks.lacks("compressed clusters")),
            Self::Raw(raw) => {
                let what = "raw images have no compressed clusters";
                Err(Error::new(ErrorKind::Unsupported, what).on(raw.storage().name()))
            }
            Self::Qcow2(qcow2) => qcow2.map_compressed(guest, length).await,
            Self::Foreign(foreign) => Err(foreign.read_only()),
        }
    }

    /// The compressed form of a whole cluster; `None` where it would not be shorter, or where the
    /// format has no compressed clusters.
    pub fn compress(&self, cluster: &[u8]) -> Option<Vec<u8>> {
        // Compressed clusters are never encrypted.
        if self.is_encrypted() {
            return None;
        }
        qcow2::compress(self.compression()?, cluster)
    }

    /// Fills `into`, as long as a cluster, from the compressed form of one.
    ///
    /// # Errors
    /// Why the bytes are no compressed cluster of this image.
    pub fn decompress(&self, compressed: &[u8], into: &mut [u8]) -> Result<(), String> {
        if let Self::Foreign(foreign) = self {
            return foreign.decompress(compressed, into);
        }
        match self.compression() {
            Some(kind) => qcow2::decompress(kind, compressed, into),
            None => Err("the format has no compressed clusters".to_owned()),
        }
    }

    /// Begins a read: to be called before [`map`](Self::map) with [`Intent::Read`], and the guard
    /// to be dropped when the data is read. Until then the mapped host ranges get no new owner,
    /// whatever is written, discarded and flushed meanwhile. The holder must wait for nothing
    /// but reads. `None` where host ranges never change their owner.
    pub fn begin_read(&self) -> Option<ReadGuard<'_>> {
        match self {
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => None,
            Self::Qcow2(qcow2) if qcow2.is_sidecar() => None,
            Self::Qcow2(qcow2) => Some(qcow2.begin_read()),
        }
    }

    /// Waits until the reads that have [begun](Self::begin_read) are over, and for none that begins
    /// later.
    pub async fn reads_ended(&self) {
        match self {
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => {}
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
        match self {
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => None,
            Self::Qcow2(qcow2) => Some(qcow2.begin_data_write()),
        }
    }

    /// Makes the extent visible: its data is in the storage, as durable as `data` says. The mapping
    /// is durable after the next [`flush`](Self::flush) or metadata sync. Without data the
    /// caller passes `Durability::Data`.
    pub async fn link(&self, extent: Extent, data: Durability) -> Result<()> {
        match self {
            Self::Raw(raw) => raw.link(extent),
            Self::Luks(luks) => luks.link(extent),
            Self::Qcow2(_) if extent.flags.contains(ExtentFlags::FIXED) => Ok(()),
            Self::Qcow2(qcow2) => qcow2.link(extent, data).await,
            Self::Foreign(foreign) => Err(foreign.read_only()),
        }
    }

    /// Gives the extent back: its data was not written. Never waits, so that `drop` can call it.
    pub fn abort(&self, extent: Extent, why: Abort) {
        match self {
            Self::Raw(raw) => raw.abort(extent, why),
            Self::Luks(luks) => luks.abort(extent, why),
            Self::Qcow2(_) if extent.flags.contains(ExtentFlags::FIXED) => {}
            Self::Qcow2(qcow2) => qcow2.abort(extent, why),
            Self::Foreign(_) => {}
        }
    }

    /// Makes everything linked so far durable: first the data, then the format's metadata. Waits
    /// for the writes that hold a guard of [`begin_data_write`](Self::begin_data_write).
    pub async fn flush(&self, sync: SyncMode) -> Result<()> {
        match self {
            Self::Raw(raw) => raw.flush(sync).await,
            Self::Luks(luks) => luks.flush(sync).await,
            Self::Qcow2(qcow2) => qcow2.flush(sync).await,
            Self::Foreign(_) => Ok(()),
        }
    }

    /// Makes the mappings linked so far durable, and the data that they refer to. Unlike
    /// [`flush`](Self::flush) it need not make any other data durable: enough for a write whose
    /// extents are all new, or were written by FUA.
    pub async fn sync_metadata(&self) -> Result<()> {
        match self {
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => Ok(()),
            Self::Qcow2(qcow2) => qcow2.sync_metadata().await,
        }
    }

    /// As [`sync_metadata`](Self::sync_metadata), for extents whose data was written without FUA:
    /// waits for the writes that hold a guard of [`begin_data_write`](Self::begin_data_write),
    /// so that one writeback serves all of them.
    pub async fn sync_data_and_metadata(&self) -> Result<()> {
        match self {
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => Ok(()),
            Self::Qcow2(qcow2) => qcow2.sync_data_and_metadata().await,
        }
    }

    /// The way in which the extents that are prepared now become durable with the fewest
    /// operations. Only advice: both ways are always correct.
    pub fn metadata_sync_mode(&self) -> MetadataSync {
        match self {
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => MetadataSync::Flush,
            Self::Qcow2(qcow2) => qcow2.metadata_sync_mode(),
        }
    }

    /// Words of [`StateMemory`] for a redo log of this image; 0 where none is needed, because
    /// nothing that a request has changed is in this process alone.
    pub fn redo_log_words(&self) -> usize {
        match self {
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => 0,
            Self::Qcow2(_) => qcow2::REDO_LOG_WORDS,
        }
    }

    /// Brings to the image what a process had linked that died with it open: `log` is the memory
    /// that it had attached. Durable when it returns; the log stays as it is, so that a death
    /// meanwhile loses nothing. To be called before anything is changed, and before
    /// [`attach_redo_log`](Self::attach_redo_log), of an image that was [opened for
    /// it](Self::open_before_replay).
    ///
    /// That the log belongs to this file, and that the host has not started since, is the caller's
    /// business. Whether other programs have changed the image since is found out, but for
    /// qcow2 of version 2.
    ///
    /// # Errors
    /// What the storage answers, or `Corrupt`: the log is still good.
    pub async fn replay(&self, log: &dyn StateMemory) -> Result<Replay> {
        match self {
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => Ok(Replay::Nothing),
            Self::Qcow2(qcow2) => qcow2.replay(log).await,
        }
    }

    /// Empties `log` and notes there from now on what is linked and not yet on disk, so that the
    /// next process can [`replay`](Self::replay) it if this one dies. To be called before
    /// anything is changed.
    pub fn attach_redo_log(&self, log: Arc<dyn StateMemory>) {
        match self {
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => {}
            Self::Qcow2(qcow2) => qcow2.attach_redo_log(log),
        }
    }

    /// Whether a [`replay`](Self::replay) finds out that other programs have changed the image: not
    /// of qcow2 of version 2, of which only the storage may know.
    pub fn has_sessions(&self) -> bool {
        match self {
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => false,
            Self::Qcow2(qcow2) => qcow2.features().version == qcow2::Version::V3,
        }
    }

    /// Whether the image has the mark of a process that keeps a redo log: one that has it open, or
    /// died.
    pub fn has_session_bit(&self) -> bool {
        match self {
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => false,
            Self::Qcow2(qcow2) => qcow2.has_session_bit(),
        }
    }

    /// Whether the guest's disk may become `size` bytes long, as far as that is known without a
    /// change: before work on it that takes long.
    ///
    /// # Errors
    /// Those of [`resize`](Self::resize).
    pub fn check_resize(&self, size: u64) -> Result<()> {
        match self {
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => Ok(()),
            Self::Qcow2(qcow2) => qcow2.check_resize(size),
        }
    }

    /// Lets [`map`](Self::map) for a change accept ranges up to `size`, past the end of the disk:
    /// so the caller can make zeros of the bytes that [`resize`](Self::resize) will show. The
    /// size stays. The space before `from` is prepared already, or a part of the disk.
    pub async fn prepare_resize(&self, from: u64, size: u64) -> Result<()> {
        match self {
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => Ok(()),
            Self::Qcow2(qcow2) => qcow2.prepare_resize(from, size).await,
        }
    }

    /// Makes the guest's disk longer. New bytes read as zeros, but those of the last cluster and of
    /// a backing file. Durable with the next full flush. Refuses a size that is no multiple of
    /// 512. The caller keeps requests away from the bytes between the old size and the new one.
    pub async fn resize(&self, size: u64) -> Result<()> {
        match self {
            Self::Raw(raw) => raw.resize(size).await,
            Self::Luks(luks) => luks.resize(size).await,
            Self::Qcow2(qcow2) => qcow2.resize(size).await,
            Self::Foreign(foreign) => Err(foreign.read_only()),
        }
    }

    /// Makes the guest's disk shorter; what lies beyond is lost, and its space given back. Durable
    /// with the next full flush; a crash before leaves the old size with zeros, or what is in
    /// the backing file, here and there beyond the new one. Refuses a size that is no multiple
    /// of 512, and images of version 2 with snapshots. The caller keeps requests away from the
    /// bytes from the new size on.
    pub async fn shrink(&self, size: u64) -> Result<()> {
        match self {
            Self::Raw(raw) => raw.resize(size).await,
            Self::Luks(luks) => luks.resize(size).await,
            Self::Qcow2(qcow2) => qcow2.shrink(size).await,
            Self::Foreign(foreign) => Err(foreign.read_only()),
        }
    }

    /// Drops all data of the image itself, so that all of it reads as the backing file (or as zeros
    /// without one). Durable when it returns; a crash before leaves some of the data. No request
    /// may be in flight.
    ///
    /// # Errors
    /// `Unsupported` where the format has no backing files; or what the storage answers.
    pub async fn make_empty(&self) -> Result<()> {
        match self {
            Self::Raw(raw) => Err(raw.has_no_backing()),
            Self::Luks(luks) => Err(luks.lacks("backing file")),
            Self::Qcow2(qcow2) => qcow2.make_empty().await,
            Self::Foreign(foreign) => Err(foreign.read_only()),
        }
    }

    /// Gives the image another backing file, or none: see [`Qcow2::set_backing`].
    ///
    /// # Errors
    /// As there; `Unsupported` where the format has no backing files.
    pub async fn set_backing(&self, backing: Option<Backing>) -> Result<()> {
        match self {
            Self::Raw(raw) => Err(raw.has_no_backing()),
            Self::Luks(luks) => Err(luks.lacks("backing file")),
            Self::Qcow2(qcow2) => qcow2.set_backing(backing).await,
            Self::Foreign(foreign) => Err(foreign.read_only()),
        }
    }

    /// Changes options of the image: see [`Qcow2::amend`].
    ///
    /// # Errors
    /// As there; `Unsupported` where the format has none.
    pub async fn amend(&self, amendments: Amendments) -> Result<()> {
        match self {
            Self::Raw(raw) => {
                let what = "raw images have no options that could be changed";
                Err(Error::new(ErrorKind::Unsupported, what).on(raw.storage().name()))
            }
            Self::Qcow2(qcow2) => qcow2.amend(amendments).await,
            Self::Luks(luks) => Err(luks.lacks("options that could be changed")),
            Self::Foreign(foreign) => Err(foreign.read_only()),
        }
    }

    /// Brings the image to a state in which another process can open it, with all that was linked:
    /// metadata is written and durable, and no mark says that the image is open. No request may
    /// be in flight. The image stays open, and what it has in memory stays true as long as the
    /// other process changes nothing.
    ///
    /// # Errors
    /// What the storage answers; a failure to write metadata that is remembered.
    pub async fn settle(&self) -> Result<()> {
        match self {
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => Ok(()),
            Self::Qcow2(qcow2) => qcow2.settle().await,
        }
    }

    /// Writes what [`settle`](Self::settle) would, late refcounts among it, and flushes, while
    /// requests go on.
    ///
    /// # Errors
    /// As there.
    pub async fn settle_ahead(&self) -> Result<()> {
        match self {
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => Ok(()),
            Self::Qcow2(qcow2) => qcow2.settle_ahead().await,
        }
    }

    /// Makes everything durable and ends the use of the image. No request may be in flight, and
    /// none may follow.
    pub async fn close(&self) -> Result<()> {
        match self {
            Self::Raw(raw) => raw.flush(SyncMode::Data).await,
            Self::Luks(luks) => luks.flush(SyncMode::Data).await,
            Self::Qcow2(qcow2) => qcow2.close().await,
            Self::Foreign(_) => Ok(()),
        }
    }
}
