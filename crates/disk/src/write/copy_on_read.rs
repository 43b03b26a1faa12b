//! Copy on read: clusters that a guest reads from the backing file are stored in the image. So each
//! cluster is fetched once (`copy-on-read` of QEMU).
//!
//! Guarantees: a read returns the same data as without copy on read. If several requests read the
//! same clusters at the same time, the first one fetches them. No change waits for the fetch, and
//! no newer write is overwritten (`populate`). An error of the image stops the copying, but no read
//! fails. The data needs no flush: a cluster lost in a crash is read from the backing file again.

use std::cell::Cell;

use blockhouse_core::sync::run_bounded;
use blockhouse_core::{ByteRange, Error, IoVector, Result, Storage, WorkBudget};
use futures_util::stream;

use super::Writer;
use crate::buffers::MAX_POPULATED;
use crate::layer::{BlockStatusCache, Reader};

/// The maximum number of fetches of one request that are in flight at once.
const MAX_FETCHES: usize = 8;

impl<S: Storage> Writer<S> {
    /// Reads `range` into `into`, and populates the clusters that the image leaves to its backing
    /// file. `begin_change` is called after the read; if it returns no guard, nothing is populated.
    /// `failed` is called with an error of populating.
    ///
    /// # Errors
    /// As for a read.
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
        let fetches = self.pieces(range).map(|piece| {
            let others = into.split_off(piece.length() as usize);
            let into = std::mem::replace(&mut into, others);
            self.read_piece(piece, into, begin_change, failed)
        });
        let stopped = Cell::new(false);
        run_bounded(MAX_FETCHES, &WorkBudget::new(), &stopped, stream::iter(fetches)).await
    }

    /// Populates the clusters of `range` that the image leaves to its backing file, except where
    /// `begin_change` returns no guard after the read.
    ///
    /// # Errors
    /// Errors of the backing file or the image. Parts that were filled before the error stay
    /// filled.
    pub(crate) async fn populate_all<G>(
        &self,
        range: ByteRange,
        begin_change: &dyn Fn() -> Option<G>,
    ) -> Result<()> {
        let fetches = self.pieces(range).map(|piece| self.populate_piece(piece, begin_change));
        let stopped = Cell::new(false);
        run_bounded(MAX_FETCHES, &WorkBudget::new(), &stopped, stream::iter(fetches)).await
    }

    async fn populate_piece<G>(
        &self,
        piece: ByteRange,
        begin_change: &dyn Fn() -> Option<G>,
    ) -> Result<()> {
        let mut cache = BlockStatusCache::default();
        let mut rest = piece;
        while let Some(part) = self.next_backed(rest, None, &mut cache).await? {
            self.populate(part, begin_change).await?;
            rest = rest.after(part.range.end());
        }
        Ok(())
    }

    /// The pieces of `range` whose clusters fit into one buffer.
    fn pieces(&self, range: ByteRange) -> impl Iterator<Item = ByteRange> {
        let window = MAX_POPULATED.max(self.populate_unit());
        let mut rest = range;
        std::iter::from_fn(move || {
            let piece = rest.truncate(window - rest.offset() % window);
            rest = rest.skip(piece.length());
            (!piece.is_empty()).then_some(piece)
        })
    }

    /// As [`read_and_populate`](Self::read_and_populate), of a piece whose clusters fit into one
    /// buffer.
    async fn read_piece<G>(
        &self,
        piece: ByteRange,
        mut into: IoVector,
        begin_change: &dyn Fn() -> Option<G>,
        failed: &dyn Fn(Error),
    ) -> Result<()> {
        let clusters = self.clusters_of(piece);
        let fetch = self.layer.claims().fetches().claim_exclusive(clusters).await;
        if self.find_backed(piece).await?.is_none() {
            // Another request has fetched the clusters.
            drop(fetch);
            return self.layer.read(piece, into).await;
        }
        let length = clusters.length() as usize;
        let mut buffer = self.layer.cluster_buffers().for_populating(length).await?;
        self.layer.read_aligned(clusters, fetch.attach_to(buffer.lend()), Reader::Read).await?;
        let start = (piece.offset() - clusters.offset()) as usize;
        into.copy_from(&buffer.bytes()[start..start + piece.length() as usize]);
        into.check_intact()?;
        let claim = self.layer.claims().changes().claim_exclusive(clusters).await;
        let Some(_guard) = begin_change() else { return Ok(()) };
        let stored = self.store_backed(clusters, &mut buffer, &claim).await;
        stored.map_or_else(failed, drop);
        Ok(())
    }
}
