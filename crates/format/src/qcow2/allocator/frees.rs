//! Freeing clusters: the allocator's methods for clusters on their way to be free
//! (`deferred_free`).

use std::ops::Range;

use crate::qcow2::tables::{Step, Tables};

use super::Allocator;
use super::deferred_free::{DeferredFree, Punch};

impl Allocator {
    /// References to these clusters left the tables in memory: once that is durable, the refcount
    /// of each is lowered by one.
    pub(crate) fn defer_free(&mut self, free: DeferredFree) {
        self.frees.defer(free);
    }

    /// Frees clusters that no table ever referred to, once the writes of tables that are in flight
    /// now have completed: these may be writes to them.
    pub(crate) fn abandon(&mut self, clusters: Range<u64>) {
        self.frees.abandon(DeferredFree { punch: Punch::Yes, ..DeferredFree::of(clusters) });
    }

    /// The clusters that were abandoned up to now. After the writes in flight have completed,
    /// [`defer_unlinked`](Self::defer_unlinked) follows, or before that
    /// [`abandon`](Self::abandon).
    pub(crate) fn take_abandoned(&mut self) -> Vec<Range<u64>> {
        self.frees.take_abandoned().into_iter().map(|free| free.clusters).collect()
    }

    /// Clusters that no table refers to, and to which no write is in flight, are free soon.
    pub(crate) fn defer_unlinked(&mut self, clusters: Range<u64>) {
        self.frees.defer_unlinked(DeferredFree { punch: Punch::Yes, ..DeferredFree::of(clusters) });
    }

    /// Makes runs of what is pending: tables lie among the data that they refer to, and the host is
    /// told of each run.
    pub(crate) fn join_pending_frees(&mut self) {
        self.frees.join_pending();
    }

    /// A writeback begins: what is pending free becomes freeable when it has ended.
    pub(crate) fn begin_writeback(&mut self) {
        self.frees.begin_writeback();
    }

    /// The writeback is durable.
    pub(crate) fn finish_writeback(&mut self) {
        self.frees.finish_writeback();
    }

    /// The writeback failed: what it was to make freeable is pending again.
    pub(crate) fn abort_writeback(&mut self) {
        self.frees.abort_writeback();
    }

    /// Whether anything waits to be freed.
    pub(crate) fn has_frees(&self) -> bool {
        self.frees.has_pending() || self.frees.freeable() > 0
    }

    /// Whether anything waits for a writeback to begin.
    pub(crate) fn has_pending_frees(&self) -> bool {
        self.frees.has_pending()
    }

    /// Whether so much waits to be freed that a writeback is worth its flushes.
    pub(crate) fn has_many_frees(&self, tables: &Tables) -> bool {
        self.frees.has_many(tables.file.end(), tables.geometry().cluster_bits)
    }

    /// How many entries of the list are freeable.
    pub(crate) fn freeable(&self) -> usize {
        self.frees.freeable()
    }

    /// Takes the first freeable clusters; [`free_next`](Self::free_next) or
    /// [`stop_freeing`](Self::stop_freeing) follows for each of them.
    pub(crate) fn begin_freeing(&mut self) -> Option<DeferredFree> {
        self.frees.begin_freeing()
    }

    /// Lowers the refcount of the first cluster, which leaves the range.
    pub(crate) fn free_next(&mut self, tables: &mut Tables, free: &mut DeferredFree) -> Step<()> {
        let cluster = free.clusters.start;
        self.decrement_refcount(tables, cluster)?;
        free.clusters.start = cluster + 1;
        let clusters = cluster..cluster + 1;
        self.frees.end_freeing(&DeferredFree { clusters, ..*free });
        Ok(())
    }

    /// Clusters that were being freed are freeable still, but for those that are being punched:
    /// their hole may come at any time, so they stay allocated, a leak.
    pub(crate) fn stop_freeing(&mut self, free: DeferredFree) {
        self.frees.end_freeing(&free);
        if free.punch == Punch::No {
            self.frees.defer_unlinked(free);
        }
    }
}
