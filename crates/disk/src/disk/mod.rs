//! The disk as exports and tools see it: the choke point of all requests to an image.
//!
//! - [`Disk`]: what it is made of, and what it says of itself.
//! - `images`: the images that it has had.
//! - `requests`: the one choke point of all requests.
//! - `access`: whether it may be changed.
//! - `block_sizes`: the blocks that the disk announces
//! - `copy_on_read`: reads that copy from its backing file.
//! - [`DiskJobs`]: what jobs do with it; `base`: its backing file, open for writing; `detach`:
//!   independent of its backing file.
//! - `resize`: longer and shorter disks.
//! - [`DiskStats`]: what it is measured by, and what was counted before this process had it.
//! - `patience`: how long what holds changes off waits for requests in flight.
//! - `flush_ahead`: flushes before changes are held off.
//! - `failures`: the observer of requests that fail.
//! - `hold`, `held_changes`: changes that wait until the host has room for them.
//! - [`Quiesce`]: holds the guest's changes off while the image is changed as a whole.
//! - [`QuiescedDisk`]: another image in the place of this one, and observers of changes.
//!
//! One image, reading and changing it is below, in `image`, `layer` and `write`; the use of disks
//! (snapshots, bitmaps, tools, opening files) is above.

mod access;
mod base;
mod block_sizes;
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
mod lend_pages;
#[cfg(test)]
mod long_requests;
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
pub use detach::{FurtherBase, PopulatingGuard};
pub use earlier_counts::EarlierCounts;
pub use failures::{FailedRequest, FailureObserver};
pub use flush_ahead::{FlushedAhead, flush_ahead};
pub(crate) use flush_ahead::{flush_in_rounds, quiesce_flushed};
pub use held_changes::PartyHold;
pub use hold::{Hold, HoldChange, HoldObserver};
pub(crate) use images::ImageUse;
use images::{Images, Link};
pub use jobs::DiskJobs;
use quiesce::Quiesce;
pub(crate) use quiesce::QuiescedGuard;
pub use quiesced::{QuiescedDisk, ReplacedImage};
pub use stats::DiskStats;
use write_protection::WriteProtection;

/// A guest's disk: the choke point of all requests to an image. Shared by reference among all
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
    /// The counters before this process had the disk.
    earlier: OnceLock<Box<EarlierCounts>>,
    /// How many jobs populate its image from its backing file.
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

    /// A disk over an image that stands alone.
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

    pub(crate) fn format(&self) -> &Format<FlushTracker<S>> {
        self.image().format()
    }

    /// Its limits on rates: `throttle` has their guarantees.
    pub fn throttle(&self) -> &Arc<Throttle> {
        &self.throttle
    }

    /// How people call it: the path of the image, mostly.
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

    /// The status of the first bytes of `range`, through all layers, and for how many bytes that
    /// holds (at least one, at most the length of `range`). `cache` belongs to this disk alone.
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
        cache.begin(image.layer());
        image.layer().status().block_status(range, cache, 0).await
    }

    /// Which image of the chain has the first bytes of `range`, and for how many bytes that holds
    /// (as for [`block_status`](Self::block_status)): 1 for the disk's own, 2 for its backing file,
    /// and so on; 0 if none has them.
    ///
    /// # Errors
    /// As there.
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

    /// Where the first bytes of `range` are stored. `range` must not be empty; `cache` belongs to
    /// this disk alone.
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
        cache.begin(image.layer());
        image.layer().status().map_entry(range, cache).await
    }

    /// Makes everything durable, and releases the resources of the image's storage on another host,
    /// as [`Image::close`]. The disk must not be used afterwards.
    ///
    /// # Errors
    /// Errors of the storage.
    pub async fn close(&self) -> Result<()> {
        self.close_image(self.images.last()).await
    }

    /// Closes an image; and its [base](DiskJobs::base), unless that has become the disk's image:
    /// then it is in use.
    async fn close_image(&self, link: &Link<S, Arc<Self>>) -> Result<()> {
        let closed = link.image().close().await;
        match link.base.get().filter(|base| !self.images.contains(base.image())) {
            Some(base) => closed.and(rare(base.close()).await),
            None => closed,
        }
    }

    /// All that it has had.
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
