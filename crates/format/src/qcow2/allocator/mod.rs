//! Manages the free space of the image's file: which clusters can be allocated, and when clusters
//! are free again.
//!
//! A cluster passes through the states below. The refcount in memory (`tables`) is authoritative;
//! writebacks write it to the disk.
//!
//! ```text
//!        allocate              link                 L2 entry replaced       writeback durable
//! free ------------> allocated -------> mapped -----------------> pending free --------> freeable
//!  ^  ^                  |              (an entry in memory        (an entry on disk       |
//!  |  |                  | abort         refers to it)              may refer to it)       |
//!  |  +------------------+                                                                 |
//!  +------------------- reads that may have looked it up have ended, refcount 0 -----------+
//! ```
//!
//! 1. [`Allocator::allocate`] looks in four places: runs of clusters that became free; the space
//!    that the file had when the image was opened, which a cursor scans once; clusters that were
//!    prepared for durable writes (`prepared`); the end of the file. One allocation examines a few
//!    refcount slices, also if it needs several attempts because slices must be read first.
//! 2. Metadata at the end of the file ([`Allocator::allocate_at_end`]) and L2 tables get clusters
//!    from the *reserve*: space that the host has allocated already, so a writeback never fails
//!    with ENOSPC. If the file cannot be extended, the reserve consists of contiguous clusters
//!    elsewhere (`rows`).
//! 3. [`DeferredFrees::defer`] takes clusters that no entry in memory refers to. They become free
//!    when a writeback has made the new entries durable (`deferred_free`).
//! 4. A cluster that a dropped write may still modify is *quarantined*: it is not reallocated while
//!    the image is open, because the late write would corrupt the new owner.
//!
//! Locking: the image's one lock protects the allocator and [`Tables`]; no function here waits. A
//! step without space returns `Blocked::NeedsReserve`; `writeback` gets the space while the lock is
//! not held.

mod at_end;
mod compressed;
mod deferred_free;
mod file_end;
mod free_space;
mod gaps;
mod host_space;
mod prepared;
mod reserve;
mod rows;

use std::collections::HashSet;
use std::ops::Range;

use blockhouse_core::Error;

use crate::qcow2::layout::entry::Entry;
use crate::qcow2::layout::geometry::Geometry;
use crate::qcow2::tables::{Blocked, ReserveRequest, Scan, Step, Tables};

pub(crate) use deferred_free::{DeferredFree, MIN_WAITING, Punch, Users};
pub(crate) use file_end::BackwardScan;
pub(crate) use gaps::Gaps;
pub(crate) use rows::Room;

use deferred_free::DeferredFrees;
use free_space::FreeSpace;
use prepared::Prepared;
use reserve::Reserve;
use rows::RowSearch;

/// The result of an allocation for data.
pub(crate) struct Allocated {
    pub(crate) clusters: Range<u64>,
    /// Whether all of the clusters durably hold written zeros.
    pub(crate) is_prepared: bool,
}

impl Allocated {
    fn unprepared(tables: &mut Tables, clusters: Range<u64>) -> Step<Self> {
        mark_allocated(tables, clusters).map(|clusters| Self { clusters, is_prepared: false })
    }
}

/// See the module's documentation.
pub(crate) struct Allocator {
    space: FreeSpace,
    reserve: Reserve,
    prepared: Prepared,
    rows: RowSearch,
    pub(crate) frees: DeferredFrees,
    quarantined: HashSet<u64>,
    /// Offset for the next compressed data: the end of the last compressed data, whose cluster is
    /// in use.
    free_byte_offset: Option<u64>,
}

impl Allocator {
    /// The allocator of a file of `clusters` clusters. Up to `min_waiting` bytes may wait to be
    /// freed, whatever the length of the file.
    pub(crate) fn new(clusters: u64, min_waiting: u64) -> Self {
        Self {
            space: FreeSpace::new(clusters),
            reserve: Reserve::default(),
            prepared: Prepared::default(),
            rows: RowSearch::default(),
            frees: DeferredFrees::new(min_waiting),
            quarantined: HashSet::new(),
            free_byte_offset: None,
        }
    }

    /// Discards the known free space, because other tables became the active ones.
    pub(crate) fn replace_tables(&mut self, clusters: u64) {
        self.space = FreeSpace::new(clusters);
        self.prepared = Prepared::default();
        self.rows = RowSearch::default();
        self.free_byte_offset = None;
    }

    /// The number of clusters before `end` that became free and were not allocated again.
    pub(crate) fn freed_before(&self, end: u64) -> u64 {
        self.space.free_before(end)
    }

    /// Allocates one to `limit` clusters in a row, each with a refcount of one.
    pub(crate) fn allocate(&mut self, tables: &mut Tables, limit: u64) -> Step<Range<u64>> {
        self.allocate_for_data(tables, limit, 0).map(|allocated| allocated.clusters)
    }

    /// As [`allocate`](Self::allocate); returns whether the clusters are prepared. If they are, up
    /// to `ahead` more clusters are allocated.
    pub(crate) fn allocate_for_data(
        &mut self,
        tables: &mut Tables,
        limit: u64,
        ahead: u64,
    ) -> Step<Allocated> {
        if self.space.begin_allocation() {
            // For example on a block device, no refcount block covers the rest.
            let blocks = tables.refcount_table().words();
            let last = blocks.iter().rposition(|&word| word != 0);
            let counted = last.map_or(0, |last| last as u64 + 1);
            self.lower_end(tables, counted * tables.geometry().block_refcounts());
        }
        let allocated = self.find_for_data(tables, limit, ahead)?;
        self.space.end_allocation();
        Ok(allocated)
    }

    fn find_for_data(&mut self, tables: &mut Tables, limit: u64, ahead: u64) -> Step<Allocated> {
        loop {
            let unscanned = self.space.unscanned();
            // A request could not write to clusters past the host's limit, so such clusters are the
            // last choice.
            let host_limit = self.space.host_limit(tables.geometry());
            let run = self.space.first_free_run();
            let run = run.filter(|run| run.0 < host_limit || unscanned.is_empty());
            if let Some((start, count)) = run {
                if start >= host_limit && self.frees.gain() > 0 {
                    return Err(Blocked::NeedsReserve(ReserveRequest::Frees));
                }
                let count = if start < host_limit { count.min(host_limit - start) } else { count };
                match tables.refcounts().scan(start, count.min(limit))? {
                    Scan::Free(clusters) => {
                        self.space.take_from_run(start, clusters.end - clusters.start);
                        return Allocated::unprepared(tables, clusters);
                    }
                    Scan::Allocated(_) | Scan::NoRefcountBlock => {
                        self.space.take_from_run(start, 1);
                    }
                }
            } else if !unscanned.is_empty() && self.space.may_scan() {
                let cursor = unscanned.start;
                match tables.refcounts().scan(cursor, limit.min(unscanned.end - cursor))? {
                    Scan::Free(clusters) => {
                        self.space.advance_cursor(clusters.end);
                        return Allocated::unprepared(tables, clusters);
                    }
                    Scan::Allocated(count) => {
                        self.space.advance_cursor(cursor + count);
                        self.space.note_scanned();
                    }
                    // A gap in the middle of the file gets no refcount block of its own.
                    Scan::NoRefcountBlock => self.pass_uncounted(tables, cursor),
                }
            } else if let Some(clusters) = self.scan_prepared(tables, limit + ahead)? {
                let clusters = mark_allocated(tables, clusters)?;
                return Ok(Allocated { clusters, is_prepared: true });
            } else if self.prepared.is_due(tables.file.end()) {
                return Err(Blocked::NeedsReserve(ReserveRequest::WrittenZeros));
            } else {
                let end = tables.file.end();
                match tables.refcounts().scan(end, limit)? {
                    Scan::Free(clusters) if clusters.end > self.space.length() => {
                        return Err(Blocked::NeedsReserve(ReserveRequest::Length(clusters.end)));
                    }
                    Scan::Free(_) if self.space.limit().is_some() && self.frees.gain() > 0 => {
                        return Err(Blocked::NeedsReserve(ReserveRequest::Frees));
                    }
                    Scan::Free(clusters) => {
                        tables.file.advance(clusters.end);
                        return Allocated::unprepared(tables, clusters);
                    }
                    Scan::Allocated(count) => tables.file.advance(end + count),
                    Scan::NoRefcountBlock => {
                        self.allocate_at_end(tables, 0)?;
                    }
                }
            }
        }
    }

    /// Moves the cursor from `cluster`, which no refcount block covers, to the first cluster of the
    /// next block. All calls together read the refcount table once.
    fn pass_uncounted(&mut self, tables: &Tables, cluster: u64) {
        let geometry = tables.geometry();
        let index = geometry.refcount_index(cluster).table_index;
        let blocks = tables.refcount_table().words().get(index as usize..).unwrap_or_default();
        let next = match blocks.iter().position(|&word| word != 0) {
            Some(gap) => (index + gap as u64) * geometry.block_refcounts(),
            None => self.space.scan_end(),
        };
        self.space.advance_cursor(next);
    }

    /// Decrements the refcount of a cluster after the removal of a reference to it is durable. A
    /// cluster with refcount 0 is free.
    pub(crate) fn decrement_refcount(&mut self, tables: &mut Tables, cluster: u64) -> Step<()> {
        let count = tables.refcounts().get(cluster)?;
        if count == 0 {
            let what = "the refcount of a cluster in use is 0";
            return Err(tables.corrupt(what, tables.geometry().offset_of(cluster)).into());
        }
        tables.refcounts().set(cluster, count - 1)?;
        if count == 1 {
            tables.active.remove(&cluster);
            self.close_compressed(tables.geometry(), cluster);
            self.space.free(cluster);
            self.rows.note_free(cluster);
        }
        Ok(())
    }

    /// Decrements the refcount of the first cluster, and removes the cluster from the range.
    pub(crate) fn free_next(&mut self, tables: &mut Tables, free: &mut DeferredFree) -> Step<()> {
        let cluster = free.clusters.start;
        self.decrement_refcount(tables, cluster)?;
        free.clusters.start = cluster + 1;
        let clusters = cluster..cluster + 1;
        self.frees.end_freeing(&DeferredFree { clusters, ..*free });
        Ok(())
    }

    /// Sets a refcount to the counted value. Adds the refcount block if it is missing.
    pub(crate) fn correct_refcount(
        &mut self,
        tables: &mut Tables,
        cluster: u64,
        value: u64,
    ) -> Step<()> {
        if tables.refcounts().get(cluster)? == value {
            return Ok(());
        }
        let geometry = tables.geometry();
        if value > geometry.max_refcount() {
            let what = format!("{value} references to a cluster are more than can be counted");
            return Err(tables.corrupt(what, geometry.offset_of(cluster)).into());
        }
        while !tables.refcounts().has_block(cluster)? {
            tables.file.advance(cluster + 1);
            let index = geometry.refcount_index(cluster).table_index;
            let new = self.allocate_at_end(tables, 1)?;
            if tables.refcount_block(index)?.is_none() {
                tables.refcounts().add_block(index, geometry.offset_of(new.start))?;
            } else {
                self.free_unlinked(tables, new);
            }
        }
        tables.refcounts().set(cluster, value)
    }

    /// Counts a reference of a dead process to a cluster, if the refcount is 0. If other references
    /// may share the cluster (`shared`), its refcount is incremented in any case, up to the maximum
    /// refcount. Reason: the dead process had counted each reference.
    pub(crate) fn count_reference(
        &mut self,
        tables: &mut Tables,
        cluster: u64,
        shared: bool,
    ) -> Step<()> {
        match tables.refcounts().get(cluster)? {
            0 => self.correct_refcount(tables, cluster, 1),
            count if shared && count < tables.geometry().max_refcount() => {
                self.correct_refcount(tables, cluster, count + 1)
            }
            _ => Ok(()),
        }
    }

    /// Frees clusters that no table ever referred to and no request writes to. They are free at
    /// once if their refcounts are cached and the tables are not frozen.
    pub(crate) fn free_unlinked(&mut self, tables: &mut Tables, clusters: Range<u64>) {
        let mut rest = clusters;
        // While the tables are frozen, refcounts do not change.
        while tables.freeze.is_active()
            && !rest.is_empty()
            && self.decrement_refcount(tables, rest.start).is_ok()
        {
            rest.start += 1;
        }
        if !rest.is_empty() {
            // If decrementing fails, the rest is freed later, and the next caller that processes
            // frees gets the error.
            self.frees.defer_freeable(DeferredFree::of(rest));
        }
    }

    /// The clusters to be freed when an L2 entry is replaced; `None` if there are none, and for a
    /// cluster that is never freed.
    pub(crate) fn dropped_clusters(
        &self,
        geometry: Geometry,
        old: Entry,
        new: Entry,
        punch: Punch,
    ) -> Option<DeferredFree> {
        // In a data file each guest cluster has a fixed host offset, so no host cluster is freed
        // for another use.
        if geometry.has_data_file {
            return None;
        }
        match old {
            // Other data may lie in the same clusters, so these clusters are never punched.
            Entry::Compressed(data) => Some(DeferredFree::of(data.host_clusters(geometry))),
            Entry::Standard { host: Some(host), .. } => {
                let kept = matches!(new, Entry::Standard { host: Some(new), .. }
                    if new.offset == host.offset);
                let cluster = geometry.cluster_of(host.offset);
                if kept || self.quarantined.contains(&cluster) {
                    return None;
                }
                let (punch, users) = if host.is_copied() {
                    (punch, Users::None)
                } else {
                    (Punch::No, Users::Others)
                };
                Some(DeferredFree { clusters: cluster..cluster + 1, punch, users })
            }
            Entry::Standard { host: None, .. } => None,
        }
    }

    /// Quarantines clusters: a dropped write may still modify them.
    pub(crate) fn quarantine(&mut self, clusters: Range<u64>) {
        self.quarantined.extend(clusters);
    }

    pub(crate) fn is_quarantined(&self, cluster: u64) -> bool {
        self.quarantined.contains(&cluster)
    }

    pub(crate) fn quarantined(&self) -> &HashSet<u64> {
        &self.quarantined
    }

    /// Records that clusters up to `end` were written, so the file is that long.
    pub(crate) fn note_written(&mut self, end: u64) {
        self.space.note_written(end);
    }

    /// Whether the writes in flight extend the file.
    pub(crate) fn is_growing(&self, tables: &Tables) -> bool {
        self.space.written_end() < tables.file.end()
    }
}

/// Raises the refcounts of free clusters, all in one slice.
fn mark_allocated(tables: &mut Tables, clusters: Range<u64>) -> Step<Range<u64>> {
    check_not_active(tables, clusters.clone())?;
    for cluster in clusters.clone() {
        tables.refcounts().set(cluster, 1)?;
    }
    Ok(clusters)
}

fn check_not_active(tables: &Tables, mut clusters: Range<u64>) -> Result<(), Error> {
    clusters.try_for_each(|cluster| tables.check_not_active(cluster))
}
