//! The disk as exports and tools see it.
//!
//! - [`Disk`]: what it is made of, and what it says of itself.
//! - `requests`: the one choke point of all requests.
//! - `access`: whether it may be changed.
//! - `base`: its backing file, open for writing.
//! - `block_sizes`: the blocks that the disk announces
//! - `copy_on_read`: reads that copy from its backing file.
//! - `detach`: independent of its backing file.
//! - `fork`: a disk over the image of another one.
//! - `resize`: longer and shorter disks.
//! - `rollback`: back to the image behind this one.
//! - `redo_log`: what outlives a process that dies.
//! - `limits`: how many requests and bytes a second are carried out.
//! - `metrics`: what it is measured by, and what was counted before this process had it.
//! - `patience`: how long what holds changes off waits for requests in flight.
//! - `failures`: who is told of requests that fail.
//! - `hold`, `held_changes`: changes that wait until the host has room for them.
//! - [`Quiesce`]: holds the guest's changes off while the image is changed as a whole.
//! - [`QuiescedDisk`]: another image in the place of this one, and who is told of changes.
//!
//! Reading and changing the image is below, in `layer` and `write`; the use of disks (snapshots,
//! tools, opening files) is above.

mod access;
mod base;
mod block_sizes;
mod copy_on_read;
mod current_image;
mod detach;
mod earlier_counts;
mod failures;
mod fork;
mod held_changes;
mod hold;
mod image_use;
mod limits;
#[cfg(test)]
mod long_requests;
mod metrics;
mod patience;
mod quiesce;
mod quiesced;
mod redo_log;
mod requests;
mod resize;
mod rollback;
mod write_protection;

use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, OnceLock};

use blockhouse_core::{
    Alignment, ByteRange, Capabilities, Error, ErrorKind, Offload, Result, StateMemory, Storage,
    ToolProgress, WriteCache,
};
use blockhouse_crypt::SectorCipher;
use blockhouse_format::{
    Backing, CheckReport, Compression, DataFile, Encryption, Features, Format, ImageFormat,
    VmdkFacts,
};

use crate::durability::FlushTracker;
use crate::layer::{BlockStatus, BlockStatusCache, DataCipher, Layer, MapEntry};
use crate::observers::Observers;
use crate::options::{Access, Discard, Options};
use crate::read_probe::ReadProbes;
use crate::state::{StateFile, TrackedFile};
use crate::stats::Stats;
use crate::throttle::Throttle;
use crate::write::Writer;
pub use detach::PopulatingGuard;
pub use earlier_counts::EarlierCounts;
pub use failures::{FailedRequest, FailureObserver};
pub use held_changes::PartyHold;
pub use hold::{HoldChange, HoldObserver};
use image_use::ImageUses;
use quiesce::Quiesce;
pub(crate) use quiesce::QuiescedGuard;
pub use quiesced::{QuiescedDisk, ReplacedImage};
use write_protection::WriteProtection;

/// A guest's disk: an image format over a storage. Shared by reference among all exports and
/// threads. The [crate's page](crate) has an example.
pub struct Disk<S: Storage> {
    writer: Writer<S>,
    uses: ImageUses,
    throttle: Arc<Throttle>,
    quiesce: Quiesce,
    observers: Observers,
    read_probes: ReadProbes,
    options: Options,
    /// Bytes of a sector as the images of the chain have it, when the disk was opened.
    sector_size: u64,
    protection: WriteProtection,
    failures: failures::Failures,
    hold: hold::Hold,
    /// The counters before this process had the disk.
    earlier: OnceLock<Box<EarlierCounts>>,
    /// The disk whose image has taken the place of this one's.
    successor: OnceLock<Arc<Self>>,
    /// Whether the successor is over the same file, and records its changes, or does so no longer.
    is_recorded: AtomicBool,
    /// The disk of its image's backing file, once that is open for writing.
    base: OnceLock<Arc<Self>>,
    /// The state that outlives the process, if any does.
    state: OnceLock<StateFile>,
    /// How many jobs have it get what its image leaves to its backing file.
    populating: Arc<AtomicUsize>,
    /// Whether it was told that copying on read fails.
    has_failed_to_populate: AtomicBool,
}

/// The writes to an image before it is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EarlierWrites {
    /// A process that died may have written what is not stable.
    Unknown,
    /// All of it is stable: another process has it open, and has settled it.
    Stable,
}

impl<S: Storage> Disk<S> {
    /// A disk over a raw image.
    ///
    /// # Errors
    /// `InvalidInput` when the storage is too long for a file.
    pub fn raw(storage: S, options: Options) -> Result<Self> {
        let storage = FlushTracker::new(storage, options.flush, options.access);
        Ok(Self::new(Layer::new(Format::raw(storage)?), options))
    }

    /// A disk over an image of the format. One that names a [`backing_file`](Self::backing_file) is
    /// not complete before [`with_backing`](Self::with_backing), one with a
    /// [`data_file`](Self::data_file) before [`with_data`](Self::with_data).
    ///
    /// # Errors
    /// What [`Format::open`] answers.
    pub async fn open(storage: S, format: ImageFormat, options: Options) -> Result<Self> {
        let storage = FlushTracker::new(storage, options.flush, options.access);
        Self::open_tracked(storage, format, options, None).await
    }

    /// As [`open`](Self::open), for an image whose `log` will be [replayed](Self::replay): what
    /// opening itself writes does not take the place of what the log refers to.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub async fn open_before_replay(
        storage: S,
        format: ImageFormat,
        options: Options,
        log: &dyn StateMemory,
    ) -> Result<Self> {
        let storage = FlushTracker::new(storage, options.flush, options.access);
        Self::open_tracked(storage, format, options, Some(log)).await
    }

    /// As [`open`](Self::open), with what is known of the past, and with the state file that was
    /// found. Changes that the opening itself makes are stamped in its page; its log will be
    /// replayed.
    pub(crate) async fn open_with_state(
        storage: S,
        format: ImageFormat,
        options: Options,
        earlier: EarlierWrites,
        found: Option<&StateFile>,
    ) -> Result<Self> {
        let storage = FlushTracker::new(storage, options.flush, options.access);
        let storage = match earlier {
            EarlierWrites::Unknown => storage,
            EarlierWrites::Stable => storage.after_flush(),
        };
        if let Some(found) = found {
            storage.keep_record(found.page(), TrackedFile::Image);
        }
        let log = found.map(StateFile::log);
        Self::open_tracked(storage, format, options, log.as_deref()).await
    }

    async fn open_tracked(
        storage: FlushTracker<S>,
        format: ImageFormat,
        options: Options,
        log: Option<&dyn StateMemory>,
    ) -> Result<Self> {
        let image = Format::open_before_replay(storage, format, options.of_format(), log).await?;
        let excess = image.bitmaps().map_or(0, |bitmaps| bitmaps.excess());
        if excess > 0 {
            tracing::warn!(
                "{}: its last writer died: each enabled bitmap has all changes, and may say of up to {excess} bytes \
                 more that they changed",
                image.storage().name()
            );
        }
        Ok(Self::new(Layer::new(image), options))
    }

    /// As [`open`](Self::open), as the disk was when the snapshot of this name (or id) was taken;
    /// for reading only.
    ///
    /// # Errors
    /// What [`Format::open_snapshot`] answers.
    pub async fn open_snapshot(
        storage: S,
        format: ImageFormat,
        options: Options,
        name: &str,
    ) -> Result<Self> {
        let options = Options { access: Access::ReadOnly, ..options };
        let storage = FlushTracker::new(storage, options.flush, options.access);
        let image = Format::open_snapshot(storage, format, options.of_format(), name).await?;
        Ok(Self::new(Layer::new(image), options))
    }

    fn new(layer: Layer<S>, options: Options) -> Self {
        let sector_size = layer.format().header().logical_block_size();
        let writer = Writer::new(Arc::new(layer));
        let uses = ImageUses::new(writer.layer());
        let (throttle, quiesce) = (Arc::default(), Quiesce::default());
        let protection = WriteProtection::default();
        let (observers, read_probes, failures, hold) = Default::default();
        let (earlier, state) = (OnceLock::new(), OnceLock::new());
        let (successor, base) = (OnceLock::new(), OnceLock::new());
        Self {
            writer,
            uses,
            throttle,
            quiesce,
            observers,
            read_probes,
            options,
            sector_size,
            protection,
            failures,
            hold,
            earlier,
            successor,
            is_recorded: AtomicBool::new(false),
            base,
            state,
            populating: Arc::default(),
            has_failed_to_populate: AtomicBool::new(false),
        }
    }

    /// Keeps a state file, which flushes are recorded in from now on. Once only.
    pub(crate) fn keep_state(&self, state: StateFile) {
        let (image, data) = (self.format().storage(), self.format().data());
        image.keep_record(state.page(), TrackedFile::Image);
        if !std::ptr::eq(image, data) {
            data.keep_record(state.page(), TrackedFile::Data);
        }
        // There is none before: it is made when an image is opened, or taken over.
        let _ = self.state.set(state);
    }

    /// Puts failures of flushes in force that the state file has of an earlier process.
    pub(crate) fn restore_failures(&self) {
        let (image, data) = (self.format().storage(), self.format().data());
        for tracker in [image, data] {
            tracker.restore_failure();
        }
    }

    /// The same disk with its data file, before anything is read or written.
    ///
    /// # Errors
    /// `InvalidInput` where it has none, or where the disk is the backing of another already;
    /// `Unsupported` when its clusters are smaller than the blocks of `data`.
    pub fn with_data(self, data: S) -> Result<Self> {
        let options = self.options;
        let data = FlushTracker::new(data, options.flush, options.access);
        Ok(Self::new(self.into_layer()?.with_data(data)?, options))
    }

    /// The same disk with the [files](Self::extent_files) that hold its data, before anything is
    /// read: each is one of `ranges` of `data`, in their order.
    ///
    /// # Errors
    /// `InvalidInput` where the image names another number of files, or the disk is the backing of
    /// another already; what is wrong with a file.
    pub async fn with_extents(self, data: S, ranges: &[ByteRange]) -> Result<Self> {
        let options = self.options;
        let data = FlushTracker::new(data, options.flush, options.access);
        Ok(Self::new(self.into_layer()?.with_extents(data, ranges).await?, options))
    }

    /// Whether the guest's data is encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.format().is_encrypted()
    }

    /// Whether the guest's data is encrypted in the image or one that is behind it.
    pub fn has_encrypted_layer(&self) -> bool {
        let mut layers = (0..).map_while(|depth| self.layer().at_depth(depth));
        layers.any(|layer| layer.format().is_encrypted())
    }

    /// How the guest's data is encrypted; `None` where it is not.
    ///
    /// # Errors
    /// As [`ImageHeader::read_encryption`](blockhouse_format::ImageHeader::read_encryption).
    pub async fn read_encryption(&self) -> Result<Option<Encryption>> {
        self.format().header().read_encryption().await
    }

    /// The same disk, which is encrypted so, with the cipher of its data, before anything is read.
    ///
    /// # Errors
    /// `InvalidInput` where the disk is the backing of another already.
    pub fn with_cipher(self, encryption: Encryption, cipher: SectorCipher) -> Result<Self> {
        let options = self.options;
        let cipher = DataCipher::new(encryption, cipher);
        Ok(Self::new(self.into_layer()?.with_cipher(cipher), options))
    }

    /// The layer of a disk that nothing else uses.
    fn into_layer(self) -> Result<Layer<S>> {
        let name = self.name().to_owned();
        Arc::into_inner(self.writer.into_layer()).ok_or_else(|| {
            let what = "no files can be given to a disk that backs another one";
            Error::new(ErrorKind::InvalidInput, what).on(&name)
        })
    }

    /// The descriptor of a VMDK image; `None` for other formats.
    pub fn vmdk_facts(&self) -> Option<VmdkFacts> {
        self.format().header().vmdk_facts()
    }

    /// The names of the files that together hold the disk's data, relative to the image's folder;
    /// empty where the image holds it itself, or in a [`data_file`](Self::data_file).
    pub fn extent_files(&self) -> &[Vec<u8>] {
        self.format().header().extent_files()
    }

    /// The same disk over `backing`, the disk of its backing file: what the image does not have is
    /// read from there, and past its end as zeros.
    #[must_use]
    pub fn with_backing(mut self, backing: Arc<Self>) -> Self {
        let access = backing.options().access;
        self.layer().set_backing(Arc::clone(backing.writer().layer()), access);
        self.sector_size = self.sector_size.max(backing.sector_size);
        // Nothing else uses it yet.
        self.layer().set_claims_all(self.options.copy_on_read);
        self.uses = ImageUses::new(self.writer.layer());
        self
    }

    /// The image and what reading it takes.
    pub(crate) fn layer(&self) -> &Layer<S> {
        self.writer().layer()
    }

    /// As [`layer`](Self::layer), to be kept.
    pub(crate) fn shared_layer(&self) -> &Arc<Layer<S>> {
        self.writer().layer()
    }

    /// The writer of the image.
    fn writer(&self) -> &Writer<S> {
        &self.current().writer
    }

    /// The image that it was opened with, whatever has taken its place.
    pub(crate) fn own_layer(&self) -> &Layer<S> {
        self.writer.layer()
    }

    /// How the image was opened.
    fn options(&self) -> &Options {
        &self.current().options
    }

    /// The requests of the disk's users, whatever the image was.
    fn request_stats(&self) -> &Stats {
        self.writer.layer().stats()
    }

    pub(crate) fn format(&self) -> &Format<FlushTracker<S>> {
        self.layer().format()
    }

    /// The backing file that the image names.
    pub fn backing_file(&self) -> Option<&Backing> {
        self.format().header().backing_file().filter(|_| !self.layer().is_detached())
    }

    /// The file that the image names as the one with the guest's data, if that is another one.
    pub fn data_file(&self) -> Option<&DataFile> {
        self.format().header().data_file()
    }

    /// The name of the image's format, as on the command line.
    pub fn format_name(&self) -> &'static str {
        self.format().name()
    }

    /// As [`format_name`](Self::format_name), but raw for a raw image with a sidecar.
    pub fn image_format_name(&self) -> &'static str {
        match self.format().side_file().is_some() {
            true => ImageFormat::Raw.as_str(),
            false => self.format_name(),
        }
    }

    /// Bytes of a cluster; `None` where the format has none.
    pub fn cluster_size(&self) -> Option<u64> {
        self.format().cluster_size()
    }

    /// The properties that the image's header states; `None` where the format has no header.
    pub fn features(&self) -> Option<Features> {
        self.format().header().features()
    }

    /// How clusters are compressed; `None` where the format has no compressed clusters.
    pub fn compression(&self) -> Option<Compression> {
        self.format().header().compression()
    }

    /// Bytes of the unit in which space is allocated, a power of two: a write of fewer takes as
    /// many.
    pub fn allocation_unit(&self) -> u64 {
        self.format().allocation_unit()
    }

    /// How people call it: the path of the image, mostly.
    pub fn name(&self) -> &str {
        self.layer().name()
    }

    /// As [`name`](Self::name), but of a raw image with a sidecar that of the raw image.
    pub fn image_name(&self) -> &str {
        self.layer().image_name()
    }

    /// The size in bytes, a multiple of 512.
    pub fn size(&self) -> u64 {
        self.layer().size()
    }

    /// The alignment of requests that go down as they are. Others are served too.
    pub fn alignment(&self) -> Alignment {
        self.layer().alignment()
    }

    /// The capabilities that an export may advertise: the storage's, as changed by the options.
    /// Zero writes always work; the capability says whether they are quick.
    pub fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.layer().data_capabilities();
        if self.format().has_metadata() {
            // Metadata is written when a flush asks for it, and clusters can always be given back.
            capabilities.write_cache = WriteCache::Volatile;
            capabilities.discard = Offload::Available;
        }
        if self.options().durability.sync().is_some() {
            capabilities.write_cache = WriteCache::None;
        }
        if self.options().discard == Discard::Ignore {
            capabilities.discard = Offload::Unavailable;
        }
        capabilities
    }

    /// The status of the first bytes of `range`, through all layers, and for how many bytes that
    /// holds (at least one, at most the length of `range`). `cache` belongs to this disk alone.
    ///
    /// # Errors
    /// `InvalidInput` when the range is empty or reaches past the end; or what a storage answers.
    pub async fn block_status(
        &self,
        range: ByteRange,
        cache: &mut BlockStatusCache,
    ) -> Result<(BlockStatus, u64)> {
        self.check_has_status(range)?;
        let image = self.begin_use();
        cache.begin(image.layer());
        image.layer().block_status(range, cache, 0).await
    }

    /// Which image of the chain has the first bytes of `range`, and for how many bytes that holds
    /// (as for [`block_status`](Self::block_status)): 1 for the disk's own, 2 for its backing
    /// file, and so on; 0 where none has them.
    ///
    /// # Errors
    /// As there.
    pub async fn allocation_depth(&self, range: ByteRange) -> Result<(u32, u64)> {
        self.check_has_status(range)?;
        let image = self.begin_use();
        image.layer().allocation_depth(range).await
    }

    fn check_has_status(&self, range: ByteRange) -> Result<()> {
        self.check_inside(range)?;
        if range.is_empty() {
            let what = "no block status of an empty range";
            let error = Error::new(ErrorKind::InvalidInput, what);
            return Err(error.on(self.name()).at(range.offset()));
        }
        Ok(())
    }

    /// Where the first bytes of `range` are stored. `range` must not be empty; `cache` belongs to
    /// this disk alone.
    ///
    /// # Errors
    /// `InvalidInput` when `range` reaches past the end; what the storages answer.
    pub async fn map_entry(
        &self,
        range: ByteRange,
        cache: &mut BlockStatusCache,
    ) -> Result<MapEntry> {
        self.check_inside(range)?;
        let image = self.begin_use();
        cache.begin(image.layer());
        image.layer().map_entry(range, cache).await
    }

    /// The image at a [`depth`](MapEntry::depth) of the chain: its data file's name, and its
    /// properties.
    pub fn layer_at(&self, depth: usize) -> Option<LayerInfo<'_>> {
        let layer = self.layer().at_depth(depth)?;
        Some(LayerInfo {
            name: layer.name(),
            data_name: layer.data().name(),
            format_name: layer.format().name(),
            size: layer.size(),
            is_encrypted: layer.format().is_encrypted(),
            features: layer.format().header().features(),
        })
    }

    /// Looks for errors in the image, whose changes are flushed and which must not change
    /// meanwhile; `None` where the format has nothing to check.
    ///
    /// # Errors
    /// Only what the storage answers: what is wrong with the image is in the report.
    pub async fn check(&self) -> Result<Option<CheckReport>> {
        self.check_with(&ToolProgress::default()).await
    }

    /// As [`check`](Self::check); `progress` tells of tables that were read.
    ///
    /// # Errors
    /// As there.
    pub async fn check_with(&self, progress: &ToolProgress) -> Result<Option<CheckReport>> {
        self.format().check(progress).await
    }

    /// Makes everything durable, and gives back what the image's storage holds on another host,
    /// before the disk is dropped. The disk is not used afterwards.
    ///
    /// The state file, if there is one, is removed, unless it has answered changes that could not
    /// be brought to the image. A disk that is dropped without being closed leaves it, as a
    /// process that is killed does.
    ///
    /// # Errors
    /// What the storage answers.
    pub async fn close(&self) -> Result<()> {
        self.current().close_image().await
    }

    /// As [`close`](Self::close), of this disk's own image, also where it was replaced.
    async fn close_image(&self) -> Result<()> {
        // Not `self.format()`: where the image was replaced, that is its successor's.
        let format = self.writer.layer().format();
        let (image, data) = (format.storage(), format.data());
        let layers = self.flush_layers().await;
        image.begin_close();
        data.begin_close();
        let closed = format.close().await;
        if let Some(state) = self.state.get() {
            state.close();
        }
        let image_closed = image.close().await;
        let data_closed = match std::ptr::eq(image, data) {
            true => Ok(()),
            false => data.close().await,
        };
        closed.and(image_closed).and(data_closed).and(self.close_base().await).and(layers)
    }

    /// Begins a change of the image, once none of the whole image is made.
    async fn begin_change(&self) -> quiesce::WriteGuard<'_> {
        self.quiesce.begin_write().await
    }
}

/// The description of one image of a chain, for people.
#[derive(Clone, Copy, Debug)]
pub struct LayerInfo<'a> {
    /// The path of the image, mostly.
    pub name: &'a str,
    /// The path of the file with the guest's data, which may be the image.
    pub data_name: &'a str,
    /// The name of the image's format, as `--format` takes it.
    pub format_name: &'static str,
    /// Bytes of the guest's disk that the image describes.
    pub size: u64,
    /// Whether the guest's data is encrypted in it.
    pub is_encrypted: bool,
    /// The properties that the image's header states, where the format has one.
    pub features: Option<Features>,
}
