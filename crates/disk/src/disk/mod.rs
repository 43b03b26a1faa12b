//! The disk as exports and tools see it: the single path of all requests to an image.
//!
//! - [`Disk`]: its parts and its properties.
//! - `images`: the current image and the earlier ones.
//! - `requests`: the entry points of requests, and the steps of each request.
//! - `access`: whether the disk may be changed.
//! - `block_sizes`: the block sizes that the disk reports.
//! - `copy_on_read`: reads that copy data from the backing file into the image.
//! - [`DiskJobs`]: the disk's interface for jobs; `base`: the backing file, open for writing;
//!   `detach`: makes the disk independent of its backing file.
//! - `resize`: makes the disk longer or shorter.
//! - [`DiskStats`]: the disk's counters, also those of the process that handed the disk over.
//! - `patience`: how long a change of the whole disk waits for requests in flight.
//! - `flush_ahead`: flushes before a quiesce.
//! - `failures`: the observer of failed requests.
//! - `hold`, `held_changes`: changes that got ENOSPC and wait for space on the host.
//! - [`Quiesce`]: holds the guest's changes off while the image is changed as a whole.
//! - [`QuiescedDisk`]: replaces the image, and adds observers of changes.
//!
//! Lower modules (`image`, `layer`, `write`) read and change one image. Higher modules use disks
//! (snapshots, bitmaps, tools, opening of files).

mod access;
mod base;
mod block_sizes;
mod cached_file;
mod copy_on_read;
mod detach;
mod earlier_counts;
mod failures;
mod flush_ahead;
mod held_changes;
mod hold;
mod images;
mod in_flight;
mod jobs;
mod patience;
mod quiesce;
mod quiesced;
mod requests;
mod resize;
mod stats;
mod write_protection;

use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, OnceLock};

use blockhouse_core::{ByteRange, Capabilities, Error, ErrorKind, Result, Storage, rare};
use blockhouse_format::{Format, ImageFormat};

use crate::durability::FlushTracker;
use crate::image::Image;
use crate::layer::{BlockStatus, BlockStatusCache, MapEntry};
use crate::observers::Observers;
use crate::options::Options;
use crate::read_probe::ReadProbes;
use crate::throttle::Throttle;
use crate::transient_bitmaps::SharedBitmaps;
pub use access::is_inactive;
pub use block_sizes::preferred_block_size;
pub use detach::{FurtherBase, PopulatingGuard};
pub use earlier_counts::EarlierCounts;
pub use failures::{FailedRequest, FailureObserver};
pub(crate) use flush_ahead::flush_in_rounds;
pub use flush_ahead::{FlushedAhead, flush_ahead, quiesce_flushed};
pub use held_changes::PartyHold;
pub use hold::{Hold, HoldChange, HoldObserver};
pub(crate) use images::ImageUse;
use images::{Images, Link};
pub use jobs::DiskJobs;
use quiesce::Quiesce;
pub(crate) use quiesce::QuiescedGuard;
pub use quiesced::check_overlay_size;
pub use quiesced::{QuiescedDisk, ReplacedImage};
pub(crate) use resize::Resize;
pub use stats::DiskStats;
use write_protection::WriteProtection;

/// A guest's disk: the single path of all requests to an image. Shared by reference among all
/// exports and threads. The [crate's page](crate) has an example.
pub struct Disk<S: Storage> {
    images: Images<S, Arc<Self>>,
    throttle: Arc<Throttle>,
    quiesce: Quiesce,
    pub(crate) observers: Observers,
    pub(crate) transient_bitmaps: SharedBitmaps,
    read_probes: ReadProbes,
    protection: WriteProtection,
    failures: failures::Failures,
    hold: Hold,
    /// The counters of the process that handed the disk over.
    earlier: OnceLock<Box<EarlierCounts>>,
    /// The number of jobs that populate the image from its backing file.
    populating: Arc<AtomicUsize>,
    /// Whether a failure of copy-on-read has been reported.
    has_failed_to_populate: AtomicBool,
}

impl<S: Storage> Disk<S> {
    /// A disk over an image.
    pub fn new(image: impl Into<Arc<Image<S>>>) -> Self {
        Self {
            images: Images::new(image.into()),
            throttle: Arc::default(),
            quiesce: Quiesce::default(),
            observers: Observers::default(),
            transient_bitmaps: SharedBitmaps::default(),
            read_probes: ReadProbes::default(),
            protection: WriteProtection::default(),
            failures: failures::Failures::default(),
            hold: Hold::default(),
            earlier: OnceLock::new(),
            populating: Arc::default(),
            has_failed_to_populate: AtomicBool::new(false),
        }
    }

    /// A disk over a raw image.
    ///
    /// # Errors
    /// As [`Image::raw`].
    pub fn raw(storage: S, options: Options) -> Result<Self> {
        Image::raw(storage, options).map(Self::new)
    }

    /// A disk over an image that needs no other file.
    ///
    /// # Errors
    /// As [`Image::open`].
    pub async fn open(storage: S, format: ImageFormat, options: Options) -> Result<Self> {
        Image::open(storage, format, options).await.map(Self::new)
    }

    /// The image that requests go to.
    pub fn image(&self) -> &Arc<Image<S>> {
        self.images.last().image()
    }

    /// The image in its format.
    pub fn format(&self) -> &Format<FlushTracker<S>> {
        self.image().format()
    }

    /// The rate limits. The module `throttle` describes their guarantees.
    pub fn throttle(&self) -> &Arc<Throttle> {
        &self.throttle
    }

    /// The disk's name for users: mostly the path of the image.
    pub fn name(&self) -> &str {
        self.image().name()
    }

    /// The size in bytes, a multiple of 512.
    pub fn size(&self) -> u64 {
        self.image().size()
    }

    /// As [`Image::capabilities`].
    pub fn capabilities(&self) -> Capabilities {
        self.image().capabilities()
    }

    /// The status of the first bytes of `range` through all layers, and the number of bytes with
    /// that status (at least one, at most the length of `range`). `cache` is for this disk only.
    ///
    /// # Errors
    /// `InvalidInput` when the range is empty or reaches past the end; or storage errors.
    pub async fn block_status(
        &self,
        range: ByteRange,
        cache: &mut BlockStatusCache,
    ) -> Result<(BlockStatus, u64)> {
        self.check_has_status(range)?;
        let image = self.begin_use();
        image.layer().status().block_status(range, cache, 0).await
    }

    /// The depth of the image that has the first bytes of `range`, and the number of bytes for
    /// which this holds. Depth 1 is the disk's own image, 2 its backing file, and so on; 0 means
    /// that no image has the bytes.
    ///
    /// # Errors
    /// As [`block_status`](Self::block_status).
    pub async fn allocation_depth(&self, range: ByteRange) -> Result<(u32, u64)> {
        self.check_has_status(range)?;
        let image = self.begin_use();
        image.layer().status().allocation_depth(range).await
    }

    fn check_has_status(&self, range: ByteRange) -> Result<()> {
        self.image().check_inside(range)?;
        if range.is_empty() {
            let what = "no block status of an empty range";
            let error = Error::new(ErrorKind::InvalidInput, what);
            return Err(error.on(self.name()).at(range.offset()));
        }
        Ok(())
    }

    /// The location of the first bytes of `range`. `range` must not be empty; `cache` is for this
    /// disk only.
    ///
    /// # Errors
    /// `InvalidInput` when `range` reaches past the end; storage errors.
    pub async fn map_entry(
        &self,
        range: ByteRange,
        cache: &mut BlockStatusCache,
    ) -> Result<MapEntry> {
        self.image().check_inside(range)?;
        let image = self.begin_use();
        rare(image.layer().status().map_entry(range, cache)).await
    }

    /// Makes everything durable, and releases the resources of the image's storage on another host,
    /// as [`Image::close`]. The disk must not be used afterwards.
    ///
    /// # Errors
    /// Errors of the storage.
    pub async fn close(&self) -> Result<()> {
        self.close_image(self.images.last()).await
    }

    /// Closes an image and its [base](DiskJobs::base). A base that has become an image of the disk
    /// stays open.
    async fn close_image(&self, link: &Link<S, Arc<Self>>) -> Result<()> {
        let closed = rare(link.image().close()).await;
        match link.base.get().filter(|base| !self.images.contains(base.image())) {
            Some(base) => closed.and(rare(base.close()).await),
            None => closed,
        }
    }

    /// The current image and all earlier ones.
    pub(crate) fn images(&self) -> &Images<S, Arc<Self>> {
        &self.images
    }

    /// The current image, for operations that do not prevent its replacement.
    pub(crate) fn begin_use(&self) -> ImageUse<'_, S> {
        loop {
            let image = self.image();
            let guard = image.uses.begin();
            // The image may have been replaced and closed before the guard became visible.
            if guard.is_none() || Arc::ptr_eq(image, self.image()) {
                return ImageUse { image, _guard: guard };
            }
        }
    }
}
