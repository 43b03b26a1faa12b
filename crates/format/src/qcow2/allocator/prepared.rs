//! Space that the storage fills with written zeros ahead of durable writes
//! (`Storage::prepare_zeroes`).
//!
//! The first durable write to unwritten space makes the file system commit its journal. So the next
//! clusters are prepared together, if durable writes take new clusters, and if the storage can
//! write zeros without their transfer.
//!
//! 1. A durable write that takes new space requests a preparation ([`Prepared::want`]).
//! 2. The next allocation at the end of the file is blocked, and claims a run of clusters there
//!    ([`Allocator::claim_to_prepare`]). The end moves past the run, so no other allocation takes
//!    it meanwhile.
//! 3. `writeback/fill_reserve` zeroes the run, and flushes. The run is prepared space only after
//!    the flush, because writers do not write the rest of a prepared cluster, and a durable entry
//!    must not expose old data there.
//! 4. Allocations take prepared clusters from the front.
//!
//! Prepared clusters have refcount 0, and no table refers to them. So after a crash the file may
//! extend past its last cluster in use, which is allowed: the next process treats the prepared
//! clusters as free. An orderly close truncates the file before them.

use std::ops::Range;

use crate::qcow2::layout::geometry::Geometry;
use crate::qcow2::tables::{Scan, Step, Tables};

use super::{Allocator, check_not_active};

/// One preparation takes an eighth of the file, but at least `MIN_AHEAD` clusters, and at most
/// `MAX_AHEAD` bytes (or one cluster). A shorter free run is taken as it is.
const MIN_AHEAD: u64 = 64;
const MAX_AHEAD: u64 = 64 << 20;
/// Minimum cluster size for preparation, because several smaller clusters would share a block of
/// the file system.
const MIN_CLUSTER: u64 = 4096;
/// At most 1/`MAX_SHARE` of the host's free space is prepared.
const MAX_SHARE: u64 = 16;

/// Clusters that hold written zeros, durably.
#[derive(Default)]
pub(crate) struct Prepared {
    clusters: Range<u64>,
    /// Whether durable writes have taken new space since the last preparation.
    is_wanted: bool,
    /// No preparation begins before the file has this many clusters. Reason: the last preparation
    /// failed, the host was short of space, or a refcount block was missing.
    not_before: u64,
}

impl Prepared {
    /// Records that a durable write takes new space.
    pub(crate) fn want(&mut self) {
        self.is_wanted = true;
    }

    pub(super) fn clusters(&self) -> Range<u64> {
        self.clusters.clone()
    }

    /// Removes the clusters before `end`, because they are in use or no longer prepared.
    pub(super) fn advance(&mut self, end: u64) {
        self.clusters.start = end.min(self.clusters.end);
    }

    pub(super) fn take_all(&mut self) -> Range<u64> {
        std::mem::take(&mut self.clusters)
    }

    /// Whether a run must be prepared before a cluster is taken from `end`.
    pub(super) fn is_due(&self, end: u64) -> bool {
        self.is_wanted && end >= self.not_before
    }
}

/// The number of clusters to prepare at the end of a file of `end` clusters; 0 if clusters cannot
/// be prepared, or if the host's free space (`free`, in bytes) is too small.
fn clusters_ahead(geometry: Geometry, end: u64, free: Option<u64>) -> u64 {
    if geometry.has_data_file || geometry.cluster_size() < MIN_CLUSTER {
        return 0;
    }
    let limit = (MAX_AHEAD >> geometry.cluster_bits).max(1);
    let wanted = (end / 8).max(MIN_AHEAD).min(limit);
    let may_take = free.map_or(u64::MAX, |free| (free / MAX_SHARE) >> geometry.cluster_bits);
    if may_take < wanted { 0 } else { wanted }
}

impl Allocator {
    /// Requests that further space is prepared, if possible, because a durable write takes new
    /// space.
    pub(crate) fn want_prepared(&mut self) {
        self.prepared.want();
    }

    /// Whether any cluster is prepared.
    pub(crate) fn has_prepared(&self) -> bool {
        !self.prepared.clusters.is_empty()
    }

    /// Claims a run of free clusters at the end of the file for preparation; `None` if no
    /// preparation is due. `free` is the host's free space in bytes, if known.
    pub(crate) fn claim_to_prepare(
        &mut self,
        tables: &mut Tables,
        free: Option<u64>,
    ) -> Step<Option<Range<u64>>> {
        let end = tables.file.end();
        if !self.prepared.is_due(end) || !self.prepared.clusters().is_empty() {
            return Ok(None);
        }
        let wanted = clusters_ahead(tables.geometry(), end, free);
        if wanted == 0 || self.space.limit().is_some() {
            self.stop_preparing(end);
            return Ok(None);
        }
        loop {
            let end = tables.file.end();
            let in_file = self.space.length().saturating_sub(end);
            // A device never becomes larger, so the run must fit into it.
            let count = if free.is_none() && in_file > 0 { wanted.min(in_file) } else { wanted };
            match tables.refcounts().scan(end, count)? {
                Scan::Free(clusters) => {
                    check_not_active(tables, clusters.clone())?;
                    tables.file.advance(clusters.end);
                    self.prepared.is_wanted = false;
                    return Ok(Some(clusters));
                }
                Scan::Allocated(count) => tables.file.advance(end + count),
                // No refcount block counts these clusters. The next allocation places the block and
                // uses unprepared clusters, so preparation is retried after it.
                Scan::NoRefcountBlock => {
                    self.prepared.not_before = end + 1;
                    return Ok(None);
                }
            }
        }
    }

    /// Makes the claimed clusters prepared: they durably hold written zeros.
    pub(crate) fn put_prepared(&mut self, clusters: Range<u64>) {
        self.space.note_written(clusters.end);
        self.space.set_length(clusters.end);
        self.prepared.clusters = clusters;
    }

    /// Returns claimed clusters that could not be prepared, so that they are free as before. The
    /// next attempt waits until the file is longer.
    pub(crate) fn give_up_preparing(&mut self, tables: &mut Tables, clusters: Range<u64>) {
        tables.file.unreserve(clusters.end, clusters.start);
        if tables.file.end() > clusters.start {
            self.space.free_range(clusters.clone());
        }
        self.stop_preparing(clusters.start);
    }

    fn stop_preparing(&mut self, end: u64) {
        self.prepared.is_wanted = false;
        self.prepared.not_before = end + MIN_AHEAD;
    }

    /// Makes prepared clusters ordinary free clusters: other tables may take them.
    pub(crate) fn drop_prepared(&mut self) {
        let clusters = self.prepared.take_all();
        self.space.free_range(clusters);
    }

    /// Takes up to `limit` prepared clusters; `None` if there are none.
    pub(super) fn scan_prepared(
        &mut self,
        tables: &mut Tables,
        limit: u64,
    ) -> Step<Option<Range<u64>>> {
        loop {
            let prepared = self.prepared.clusters();
            if prepared.is_empty() {
                return Ok(None);
            }
            match tables
                .refcounts()
                .scan(prepared.start, limit.min(prepared.end - prepared.start))?
            {
                Scan::Free(clusters) => {
                    self.prepared.advance(clusters.end);
                    return Ok(Some(clusters));
                }
                Scan::Allocated(count) => self.prepared.advance(prepared.start + count),
                Scan::NoRefcountBlock => self.prepared.advance(prepared.end),
            }
        }
    }
}
