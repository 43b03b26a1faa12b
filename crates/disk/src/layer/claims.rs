//! The claims of requests on ranges of a layer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blockhouse_core::ByteRange;

use crate::claims::{Claim, Tracker};

/// See the module's page.
pub(crate) struct LayerClaims {
    /// Bytes of a block, the unit in which the storage of the data is read and written.
    block: u64,
    /// Whether all changes claim their range.
    all: AtomicBool,
    changes: Arc<Tracker>,
    /// Claims of fetches from the backing file. No change waits for them.
    fetches: Arc<Tracker>,
}

impl LayerClaims {
    pub(super) fn new(block: u64) -> Self {
        let all = AtomicBool::new(false);
        Self { block, all, changes: Arc::default(), fetches: Arc::default() }
    }

    /// Sets whether all changes claim their range from now on, even if blocks are never changed in
    /// part. No change may be in flight.
    pub(crate) fn set_all(&self, all: bool) {
        self.all.store(all, Ordering::SeqCst);
    }

    /// Whether a change claims its range.
    pub(crate) fn is_needed(&self) -> bool {
        self.block > 1 || self.all.load(Ordering::Relaxed)
    }

    /// The ranges that are being changed.
    pub(crate) fn changes(&self) -> &Arc<Tracker> {
        &self.changes
    }

    /// The ranges that are being fetched from the backing file, each by one request.
    pub(crate) fn fetches(&self) -> &Arc<Tracker> {
        &self.fetches
    }

    /// Claims the end of the disk exclusively, from the block that contains `offset` on.
    pub(crate) async fn claim_end(&self, offset: u64) -> Claim<'static> {
        let block = offset & !(self.block - 1);
        self.changes.claim_exclusive(ByteRange::between(block, u64::MAX)).await
    }

    /// Claims the last block of a disk whose `end` lies inside it, so that the disk does not grow
    /// while `range` is read. `None` if `range` does not touch such a block.
    pub(super) async fn claim_partial_end(&self, range: ByteRange, end: u64) -> Option<Claim<'_>> {
        let last = end & !(self.block - 1);
        if range.end() <= last || last == end {
            return None;
        }
        Some(self.changes.claim_shared(ByteRange::between(last, end)).await)
    }
}
