//! Copy on read: what a guest reads from the backing file becomes the image's own, so that each cluster is fetched once
//! (`copy-on-read` of QEMU).
//!
//! Guarantees: a read gets what it would get without. What the image leaves to its backing file is read under an exclusive claim
//! to whole clusters, so of requests that read them at the same time the first one fetches them, and no newer write is undone
//! (`populate`). An error of the image ends the populating and no read. The data needs no flush: what a crash loses is left to the
//! backing file again.

use std::cell::Cell;

use blockhouse_core::sync::run_bounded;
use blockhouse_core::{ByteRange, Error, IoVector, Result, Storage, WorkBudget};
use futures_util::stream;

use super::Writer;
use crate::buffers::MAX_POPULATED;

/// Fetches of one request that are in flight together.
const MAX_FETCHES: usize = 8;

impl<S: Storage> Writer<S> {
    /// Fills `into` with the bytes of `range`, and makes the clusters that the image leaves to its backing file its own, where
    /// `begin_change` gives a guard after they were read. Why that failed is told to `failed`.
    ///
    /// # Errors
    /// As a read's.
    pub(crate) async fn read_and_populate<G>(
        &self,
        range: ByteRange,
        mut into: IoVector,
        begin_change: &dyn Fn() -> Option<G>,
        failed: &dyn Fn(Error),
    ) -> Result<()> {
        if self.find_backed(range).await?.is_none() {
            return self.layer.read(range, into).await;
        }
        let window = MAX_POPULATED.max(self.populate_unit());
        let mut pieces = Vec::new();
        let mut rest = range;
        while !rest.is_empty() {
            let piece = rest.truncate(window - rest.offset() % window);
            let others = into.split_off(piece.length() as usize);
            pieces.push((piece, std::mem::replace(&mut into, others)));
            rest = rest.skip(piece.length());
        }
        let stopped = Cell::new(false);
        let fetches = pieces
            .into_iter()
            .map(|(piece, into)| self.read_piece(piece, into, begin_change, failed));
        run_bounded(MAX_FETCHES, &WorkBudget::new(), &stopped, stream::iter(fetches)).await
    }

    /// As [`read_and_populate`](Self::read_and_populate), of a piece whose clusters fit into one buffer.
    async fn read_piece<G>(
        &self,
        piece: ByteRange,
        mut into: IoVector,
        begin_change: &dyn Fn() -> Option<G>,
        failed: &dyn Fn(Error),
    ) -> Result<()> {
        let clusters = self.clusters_of(piece);
        let claim = self.layer.claims().claim_exclusive(clusters).await;
        if self.find_backed(piece).await?.is_none() {
            // Another request has fetched it.
            drop(claim);
            return self.layer.read(piece, into).await;
        }
        let length = clusters.length() as usize;
        let mut buffer = self.layer.cluster_buffers().for_populating(length).await?;
        self.layer.read_aligned(clusters, claim.attach_to(buffer.lend())).await?;
        let start = (piece.offset() - clusters.offset()) as usize;
        into.copy_from(&buffer.bytes()[start..start + piece.length() as usize]);
        into.check_intact()?;
        let Some(_guard) = begin_change() else { return Ok(()) };
        let stored = self.store_backed(clusters, &mut buffer, &claim).await;
        stored.map_or_else(failed, drop);
        Ok(())
    }
}
