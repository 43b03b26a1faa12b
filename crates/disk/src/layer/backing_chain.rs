//! Finds the backing file that has a cluster's data, without a look-up in every file above it each
//! time.
//!
//! Guarantees:
//! - A layer is skipped only if it leaves the whole range to its own backing files. Layers are open
//!   for reading only, so a result stays true ([`SkipTable`]).
//! - Results are not cached for a chain with a writable layer ([`BackingChain::known`]), nor after
//!   a layer was reopened.
//! - A look-up in a layer may cover more than the request's range. An error in the extra part fails
//!   no request.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockhouse_core::{ByteRange, ExtentState, Storage, WorkBudget, rare};
use blockhouse_format::Intent;

use super::Layer;
use super::skip_table::SkipTable;
use crate::options::Access;

/// Minimum and maximum bytes of a granule.
const GRANULES: [u64; 2] = [4 << 10, 2 << 20];

/// The cost of each granule of a look-up, in the unit of [`WorkBudget`].
const ENTRY: u64 = WorkBudget::LOOK_UP / 8;

/// The backing files of an image, the nearest first.
pub(super) struct BackingChain<S: Storage> {
    layers: Vec<Arc<Layer<S>>>,
    /// Bytes of a granule, a power of two: no more than the smallest cluster, unless that is
    /// smaller than a granule may be.
    granule: u64,
    skips: SkipTable,
}

impl<S: Storage> BackingChain<S> {
    /// The image's chain, if results can be cached for it and are useful. `None` for a layer that
    /// is itself read through another layer's chain.
    pub(super) fn known(image: &Layer<S>) -> Option<&Self> {
        if !image.remembers_chain.load(Ordering::Acquire) {
            return None;
        }
        image.chain.get_or_init(|| Self::of(image)).as_ref()
    }

    /// `None` for a chain that is too short, or may change.
    fn of(image: &Layer<S>) -> Option<Self> {
        let mut layers: Vec<Arc<Layer<S>>> = Vec::new();
        let mut layer = image;
        while let Some((backing, access)) = layer.opened().first() {
            if access != Access::ReadOnly {
                return None;
            }
            layers.push(Arc::clone(backing));
            layer = backing;
        }
        if layers.len() < 2 {
            return None;
        }
        let clusters = layers.iter().filter_map(|layer| layer.format().cluster_size());
        let granule = clusters.min().unwrap_or(GRANULES[1]).clamp(GRANULES[0], GRANULES[1]);
        let skips = SkipTable::new(image.size().div_ceil(granule));
        Some(Self { layers, granule, skips })
    }

    /// The layer of this index: 0 is the nearest one.
    pub(super) fn layer(&self, index: usize) -> &Layer<S> {
        &self.layers[index]
    }

    /// Returns the index of the first layer that may have data at the start of `range`, and the
    /// first part of `range` with this index. `range` is not empty. Yields when the request's
    /// `budget` is spent.
    pub(super) async fn find(&self, range: ByteRange, budget: &WorkBudget) -> (usize, ByteRange) {
        let (first, end) = (range.offset() / self.granule, range.end().div_ceil(self.granule));
        let (depth, mut next) = match self.skips.get(first) {
            Some(depth) => (depth, first + 1),
            // Boxed, so that the future of the common path stays small.
            None => rare(self.find_out(first..end, budget)).await,
        };
        while next < end && self.skips.get(next) == Some(depth) {
            next += 1;
        }
        let part = self.bytes_of(first..next).end().min(range.end());
        (depth, ByteRange::between(range.offset(), part))
    }

    fn bytes_of(&self, granules: Range<u64>) -> ByteRange {
        let [start, end] =
            [granules.start, granules.end].map(|one| one.saturating_mul(self.granule));
        ByteRange::between(start, end)
    }

    /// How many layers leave all of the first granules of `run` to their backing files, and the end
    /// of these granules. One look-up in a layer covers all granules for which the results so far
    /// are the same.
    async fn find_out(&self, mut run: Range<u64>, budget: &WorkBudget) -> (usize, u64) {
        // The last layer leaves nothing to others.
        let last = self.layers.len() - 1;
        for (skips, layer) in self.layers[..last].iter().enumerate() {
            // Zeros past the end are the layer's own.
            let inside = layer.size() / self.granule;
            if inside <= run.start {
                return self.remember(run, skips);
            }
            run.end = run.end.min(inside);
            budget.spend(WorkBudget::LOOK_UP + (run.end - run.start) * ENTRY).await;
            let Ok(extent) = layer.format().map(self.bytes_of(run.clone()), Intent::Read).await
            else {
                // A read of the damaged part reports the error. Nothing is remembered, because the
                // part may be readable later.
                return (skips, run.start + 1);
            };
            let length = extent.guest.length();
            let whole = length / self.granule;
            if extent.state != ExtentState::Backing || whole == 0 {
                run.end = run.end.min(run.start + length.div_ceil(self.granule));
                return self.remember(run, skips);
            }
            run.end = run.start + whole;
        }
        self.remember(run, last)
    }

    fn remember(&self, granules: Range<u64>, skips: usize) -> (usize, u64) {
        granules.clone().for_each(|granule| self.skips.set(granule, skips));
        (skips, granules.end)
    }
}
