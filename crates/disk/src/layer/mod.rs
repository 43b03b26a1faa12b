//! A layer: one image of a chain, with the state that reads of the image need.
//!
//! - [`Layer`] owns the format, the backing layer and the buffers that reads need. A layer never
//!   changes a guest's bytes: the module `write` does.
//! - [`read`]: reads extent by extent, through an aligned buffer if unaligned (`unaligned`), and
//!   through a cache for compressed clusters (`compressed`).
//! - `behind`: the backing layers for unallocated clusters, the current and former ones.
//! - `backing_reads`: the reads of backing files in flight; `waits` reports them.
//! - `backing_chain`: finds the backing file with an unallocated range of the image; `skip_table`:
//!   remembers the results.
//! - `encrypted`: reads and writes of an encrypted image's guest data; `data_cipher`: its cipher.
//! - `unstable`: backing files with writes that no flush has covered; `stability`: whether there
//!   are any.
//! - `stands`: the number of overlays of this image.
//! - `claims`: the ranges that requests have claimed.
//! - [`block_status`] and [`map_entry`]: state and location of the parts of a disk, through all
//!   layers.

mod backing_chain;
mod backing_reads;
mod behind;
mod block_status;
mod claims;
mod compressed;
mod data_cipher;
mod encrypted;
mod map_entry;
mod read;
mod skip_table;
mod stability;
mod stands;
mod unaligned;
mod unstable;
mod waits;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use blockhouse_core::{Alignment, ByteRange, Error, ErrorKind, Extent, Result, Storage};
use blockhouse_format::{Backing as BackingName, Format};

use crate::buffers::{BounceBuffers, ClusterBuffers, DecompressedCache};
use crate::durability::FlushTracker;
use crate::options::Access;
use crate::stats::Stats;

use backing_chain::BackingChain;
use backing_reads::BackingReads;
use claims::LayerClaims;
use stability::Stability;
pub(crate) use stands::Stands;

pub(crate) use backing_reads::Reader;
pub(crate) use block_status::HostRuns;
pub use block_status::{BlockStatus, BlockStatusCache};
pub(crate) use data_cipher::DataCipher;
pub use data_cipher::DataEncryption;
pub use map_entry::{MapEntry, MapEntryKind};
pub(crate) use unaligned::common;
pub use waits::BackingWait;

/// The backing files of an image since it was opened, in chronological order.
pub(super) struct Behind<S: Storage>(OnceLock<Backing<S>>);

/// The layer of a backing file, and whether it may be changed.
struct Backing<S: Storage> {
    layer: Arc<Layer<S>>,
    access: Access,
    /// The name of the layer's file in the image's header, if the header had another name when the
    /// image was opened.
    name: Option<BackingName>,
    /// Whether the layer counts the image among its overlays.
    is_counted: AtomicBool,
    /// The replacement of this layer; an inner `None` after a detach without a replacement.
    next: OnceLock<Option<Box<Self>>>,
}

impl<S: Storage> Default for Behind<S> {
    fn default() -> Self {
        Self(OnceLock::new())
    }
}

impl<S: Storage> Behind<S> {
    /// The current backing file; `None` for an image without one, also after its detach.
    fn now(&self) -> Option<&Backing<S>> {
        let mut backing = self.0.get()?;
        while let Some(next) = backing.next.get() {
            backing = next.as_deref()?;
        }
        Some(backing)
    }

    /// Replaces the current backing file by `next`.
    fn leave(&self, next: Option<Backing<S>>) {
        if let Some(backing) = self.now() {
            // `backing` is the last backing file, so its `next` is unset.
            let _ = backing.next.set(next.map(Box::new));
        }
    }
}

impl<S: Storage> Backing<S> {
    /// Removes the image from the count of the layer's overlays.
    fn leave(&self) {
        if self.is_counted.swap(false, Ordering::SeqCst) {
            self.layer.stands.leave();
        }
    }
}

impl<S: Storage> Drop for Backing<S> {
    fn drop(&mut self) {
        self.leave();
    }
}

/// See the module's page.
pub struct Layer<S: Storage> {
    format: Format<FlushTracker<S>>,
    pub(crate) encryption: DataEncryption,
    /// The alignment that the data's storage and its encryption require.
    alignment: Alignment,
    /// The backing files for the image's unallocated clusters.
    behind: Behind<S>,
    /// A later opening of the same image, which replaces this layer in the chains of other images.
    successor: OnceLock<Arc<Layer<S>>>,
    stability: Stability,
    /// The layers that have this one as their backing file.
    stands: Stands,
    /// The image's backing files; an inner `None` for fewer than two, or if one is writable.
    chain: OnceLock<Option<BackingChain<S>>>,
    /// Whether `chain` may be used: reads of the chain begin at this layer, and the chain is as it
    /// was opened.
    remembers_chain: AtomicBool,
    backing_reads: BackingReads,
    claims: LayerClaims,
    bounce_buffers: BounceBuffers,
    cluster_buffers: ClusterBuffers,
    decompressed: DecompressedCache,
    stats: Stats,
}

impl<S: Storage> Layer<S> {
    pub(crate) fn new(format: Format<FlushTracker<S>>) -> Self {
        let encryption =
            if format.is_encrypted() { DataEncryption::Locked } else { DataEncryption::None };
        Self::with_encryption(format, encryption)
    }

    /// The same layer with the key of its encrypted data.
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
            behind: Behind::default(),
            successor: OnceLock::new(),
            stability: Stability::default(),
            stands: Stands::default(),
            chain: OnceLock::new(),
            remembers_chain: AtomicBool::new(true),
            backing_reads: BackingReads::default(),
            claims: LayerClaims::new(u64::from(alignment.offset)),
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

    /// The image in its format.
    pub fn format(&self) -> &Format<FlushTracker<S>> {
        &self.format
    }

    /// The file that the host offsets of extents point to.
    pub fn data(&self) -> &FlushTracker<S> {
        self.format.data()
    }

    /// The image's name in messages: its path, mostly.
    pub fn name(&self) -> &str {
        self.format.storage().name()
    }

    /// As [`name`](Self::name), but for a raw image with a side file the name of the raw image.
    pub fn image_name(&self) -> &str {
        if self.format.side_file().is_some() { self.format.data().name() } else { self.name() }
    }

    /// The size in bytes, a multiple of 512.
    pub fn size(&self) -> u64 {
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

    /// The ranges that requests have claimed.
    pub(crate) fn claims(&self) -> &LayerClaims {
        &self.claims
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

    /// Drops cached decompressed clusters of a range that is about to change.
    pub(crate) fn invalidate(&self, range: ByteRange) {
        self.decompressed.invalidate(range);
    }

    /// The error for an extent whose state does not fit the operation.
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
