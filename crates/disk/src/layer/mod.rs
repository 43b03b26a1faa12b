//! One image of a chain, with what reading it takes.
//!
//! - [`Layer`] owns the format, the backing layer and the buffers that reads need. It never changes
//!   a guest's bytes: `write` does.
//! - [`read`]: a read, extent by extent; through an aligned buffer where it is not aligned
//!   (`unaligned`); compressed clusters by way of a cache (`compressed`).
//! - `backing_reads`: which reads of backing files are in flight; `waits` tells of them.
//! - `backing_chain`: which backing file has what the image leaves to its chain; `skip_table`: what
//!   is remembered of that.
//! - `encrypted`: the way of the guest's data of an encrypted image; `data_cipher`: its cipher.
//! - `unstable`: images behind this one with writes that no flush has covered.
//! - [`block_status`] and [`map_entry`]: what and where the parts of a disk are, through all
//!   layers.

mod backing_chain;
mod backing_reads;
mod block_status;
mod compressed;
mod data_cipher;
mod encrypted;
mod map_entry;
mod read;
mod skip_table;
mod unaligned;
mod unstable;
mod waits;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use blockhouse_core::{Alignment, ByteRange, Error, ErrorKind, Extent, Result, Storage};
use blockhouse_format::Format;

use crate::buffers::{BounceBuffers, ClusterBuffers, DecompressedCache};
use crate::claims::{Claim, Tracker};
use crate::durability::FlushTracker;
use crate::options::Access;
use crate::stats::Stats;

use backing_chain::BackingChain;
use backing_reads::BackingReads;

pub(crate) use backing_reads::Reader;
pub(crate) use block_status::HostRuns;
pub use block_status::{BlockStatus, BlockStatusCache};
pub(crate) use data_cipher::DataCipher;
use data_cipher::DataEncryption;
pub use map_entry::{MapEntry, MapEntryKind};
pub(crate) use unaligned::common;
pub use waits::BackingWait;

/// See the module's page.
pub(crate) struct Layer<S: Storage> {
    format: Format<FlushTracker<S>>,
    encryption: DataEncryption,
    /// The demands of the data's storage and of its encryption.
    alignment: Alignment,
    /// Where the image's unallocated clusters are read from.
    backing: OnceLock<Backing<S>>,
    /// Another opening of the same image, which takes this one's place behind others.
    successor: OnceLock<Arc<Layer<S>>>,
    /// Whether the image leaves nothing to its backing file, for ever.
    is_detached: AtomicBool,
    /// Whether all changes claim their range.
    claims_all: AtomicBool,
    /// Whether nothing that was written to it here may be lost, if others stand on it.
    is_stable: AtomicBool,
    /// Whether all behind it are stable.
    is_behind_stable: AtomicBool,
    /// How many layers have it as their backing file.
    stands: AtomicUsize,
    /// The image's backing files, if they are many.
    chain: OnceLock<Option<BackingChain<S>>>,
    /// Whether the chain may be used: it is read from here, and as it was opened.
    remembers_chain: AtomicBool,
    backing_reads: BackingReads,
    claims: Arc<Tracker>,
    /// Of what is copied from the backing file, which no change waits for.
    fetches: Arc<Tracker>,
    bounce_buffers: BounceBuffers,
    cluster_buffers: ClusterBuffers,
    decompressed: DecompressedCache,
    stats: Stats,
}

/// The layer of a backing file, and whether anybody may change it.
struct Backing<S: Storage> {
    layer: Arc<Layer<S>>,
    access: Access,
}

impl<S: Storage> Backing<S> {
    fn new(layer: Arc<Layer<S>>, access: Access) -> Self {
        layer.stands.fetch_add(1, Ordering::SeqCst);
        Self { layer, access }
    }
}

impl<S: Storage> Drop for Backing<S> {
    fn drop(&mut self) {
        self.layer.stands.fetch_sub(1, Ordering::SeqCst);
    }
}

impl<S: Storage> Layer<S> {
    pub(crate) fn new(format: Format<FlushTracker<S>>) -> Self {
        let encryption = match format.is_encrypted() {
            true => DataEncryption::Locked,
            false => DataEncryption::None,
        };
        Self::with_encryption(format, encryption)
    }

    /// The same layer, whose data is encrypted, with its key.
    pub(crate) fn with_cipher(self, cipher: DataCipher) -> Self {
        Self::with_encryption(self.format, DataEncryption::Unlocked(Box::new(cipher)))
    }

    fn with_encryption(format: Format<FlushTracker<S>>, encryption: DataEncryption) -> Self {
        let alignment = encryption.alignment(format.data().capabilities().alignment);
        let cluster_size = format.cluster_size().unwrap_or(u64::from(alignment.offset));
        Self {
            format,
            encryption,
            alignment,
            backing: OnceLock::new(),
            successor: OnceLock::new(),
            is_detached: AtomicBool::new(false),
            claims_all: AtomicBool::new(false),
            is_stable: AtomicBool::new(true),
            is_behind_stable: AtomicBool::new(true),
            stands: AtomicUsize::new(0),
            chain: OnceLock::new(),
            remembers_chain: AtomicBool::new(true),
            backing_reads: BackingReads::default(),
            claims: Arc::default(),
            fetches: Arc::default(),
            bounce_buffers: BounceBuffers::new(),
            cluster_buffers: ClusterBuffers::new(cluster_size),
            decompressed: DecompressedCache::new(cluster_size),
            stats: Stats::default(),
        }
    }

    /// The same layer with its data file: see [`Format::with_data`].
    pub(crate) fn with_data(self, data: FlushTracker<S>) -> Result<Self> {
        Ok(Self::new(self.format.with_data(data)?))
    }

    /// The same layer with the files that the image names for its data: see
    /// [`Format::with_extents`].
    pub(crate) async fn with_extents(
        self,
        data: FlushTracker<S>,
        ranges: &[ByteRange],
    ) -> Result<Self> {
        Ok(Self::new(self.format.with_extents(data, ranges).await?))
    }

    /// Reads from `layer`, which was opened with this `access`, what the image leaves to its
    /// backing file, from now on. Once only.
    pub(crate) fn set_backing(&self, layer: Arc<Self>, access: Access) {
        self.format.set_backing_size(layer.size());
        // Its chain is a part of this one's.
        layer.remembers_chain.store(false, Ordering::Release);
        // A second one would change what was read already.
        let _ = self.backing.set(Backing::new(layer, access));
    }

    /// Reads what the image leaves to its backing file through `backing` from now on, another
    /// opening of the same file, which may change it. Reads that are in flight may use the
    /// older one.
    pub(crate) fn replace_backing(&self, backing: Arc<Self>) {
        // A read that begins when those in flight have ended sees it. The base remembers its own
        // chain.
        self.remembers_chain.store(false, Ordering::Release);
        match self.backing_layer() {
            // The last one of its line has none.
            Some(older) => drop(older.successor.set(backing)),
            None => self.set_backing(backing, Access::ReadWrite),
        }
    }

    /// The layer behind this one, by the last opening of its file.
    pub(crate) fn backing_layer(&self) -> Option<&Arc<Self>> {
        if self.is_detached.load(Ordering::Acquire) {
            return None;
        }
        let layer = Self::last(&self.backing.get()?.layer);
        Some(layer)
    }

    pub(crate) fn format(&self) -> &Format<FlushTracker<S>> {
        &self.format
    }

    /// The file that the host offsets of extents point to.
    pub(crate) fn data(&self) -> &FlushTracker<S> {
        self.format.data()
    }

    /// How people call the image: its path, mostly.
    pub(crate) fn name(&self) -> &str {
        self.format.storage().name()
    }

    /// As [`name`](Self::name), but of a raw image with a sidecar that of the raw image.
    pub(crate) fn image_name(&self) -> &str {
        match self.format.side_file().is_some() {
            true => self.format.data().name(),
            false => self.name(),
        }
    }

    /// The size in bytes, a multiple of 512.
    pub(crate) fn size(&self) -> u64 {
        self.format.size()
    }

    pub(crate) fn alignment(&self) -> Alignment {
        self.alignment
    }

    /// Bytes of a block, the unit in which the storage of the data is read and written.
    pub(crate) fn block_size(&self) -> u64 {
        u64::from(self.alignment.offset)
    }

    /// The whole blocks that `range` touches, up to the end of the disk.
    pub(crate) fn blocks_of(&self, range: ByteRange) -> ByteRange {
        range.align_outward(self.block_size()).before(self.format.end())
    }

    /// Has nothing behind this layer. No read may be in flight that looked something up before it
    /// was the image's own.
    pub(crate) fn detach_backing(&self) {
        self.is_detached.store(true, Ordering::Release);
    }

    /// Whether the backing file that the image had when it was opened was detached.
    pub(crate) fn is_detached(&self) -> bool {
        self.is_detached.load(Ordering::Acquire)
    }

    /// Whether all changes claim their range from now on, also where blocks are never changed in
    /// part. No change may be in flight.
    pub(crate) fn set_claims_all(&self, claims_all: bool) {
        self.claims_all.store(claims_all, Ordering::SeqCst);
    }

    /// Whether a change claims its range.
    pub(crate) fn is_claimed(&self) -> bool {
        self.block_size() > 1 || self.claims_all.load(Ordering::Relaxed)
    }

    pub(crate) fn claims(&self) -> &Arc<Tracker> {
        &self.claims
    }

    /// The ranges that are being fetched from the backing file, each by one request.
    pub(crate) fn fetches(&self) -> &Arc<Tracker> {
        &self.fetches
    }

    /// Keeps requests away from the end of the disk from `offset` on, the block that it lies in
    /// included.
    pub(crate) async fn claim_end(&self, offset: u64) -> Claim<'static> {
        let block = offset & !(self.block_size() - 1);
        self.claims.claim_exclusive(ByteRange::between(block, u64::MAX)).await
    }

    pub(crate) fn bounce_buffers(&self) -> &BounceBuffers {
        &self.bounce_buffers
    }

    pub(crate) fn cluster_buffers(&self) -> &ClusterBuffers {
        &self.cluster_buffers
    }

    pub(crate) fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Forgets what was decompressed of a range that is about to change.
    pub(crate) fn invalidate(&self, range: ByteRange) {
        self.decompressed.invalidate(range);
    }

    /// The layer that stands in for unallocated clusters, which the image has.
    fn backing(&self) -> Result<&Arc<Self>> {
        self.backing_layer().ok_or_else(|| {
            let what = "the image needs its backing file, which was not opened with it";
            Error::new(ErrorKind::Unsupported, what).on(self.name())
        })
    }

    /// This layer and all that were opened behind it, those included that were
    /// [detached](Self::detach_backing).
    pub(crate) fn opened_layers(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |layer| {
            layer.backing.get().map(|behind| &**Self::last(&behind.layer))
        })
    }

    /// The last opening of a layer's file.
    fn last(opened: &Arc<Self>) -> &Arc<Self> {
        let mut layer = opened;
        while let Some(successor) = layer.successor.get() {
            layer = successor;
        }
        layer
    }

    /// The layer `depth` steps down the chain: 0 is this one.
    pub(crate) fn at_depth(&self, depth: usize) -> Option<&Self> {
        let mut layer = self;
        for _ in 0..depth {
            layer = layer.backing_layer()?;
        }
        Some(layer)
    }

    /// The layers behind this one, the nearest first.
    pub(crate) fn layers_behind(&self) -> impl Iterator<Item = &Arc<Self>> {
        std::iter::successors(self.backing_layer(), |layer| layer.backing_layer())
    }

    /// Bytes of the backing disk; 0 without one.
    pub(crate) fn backing_size(&self) -> u64 {
        self.backing_layer().map_or(0, |backing| backing.size())
    }

    /// The error for an extent whose state makes no sense for what is to be done.
    pub(crate) fn misplaced(&self, extent: &Extent) -> Error {
        let what =
            format!("the {} mapping has no place for this: {:?}", self.format.name(), extent);
        Error::new(ErrorKind::Corrupt, what).on(self.name()).at(extent.guest.offset())
    }
}

/// The first bytes of `range` that lie before `end`.
fn within(range: ByteRange, end: u64) -> ByteRange {
    range.before(end)
}
