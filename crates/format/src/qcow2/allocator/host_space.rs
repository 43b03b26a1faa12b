//! Functions of the allocator for space on the host: the reserve for metadata (`reserve`), and the
//! length of the file.

use std::ops::Range;

use crate::qcow2::layout::geometry::Geometry;
use crate::qcow2::tables::{Blocked, ReserveRequest, Step, Tables};

use super::Allocator;

impl Allocator {
    /// Frees the unused clusters of the reserve that have a refcount: those for L2 tables, and the
    /// row.
    pub(crate) fn release_reserve(&mut self, tables: &mut Tables) {
        while let Some(cluster) = self.reserve.take_l2_table() {
            self.free_unlinked(tables, cluster..cluster + 1);
        }
        if let Some(row) = self.reserve.take_row() {
            self.free_unlinked(tables, row);
        }
    }

    /// Drops the unused reserve and the prepared clusters at the end of the file, so that other
    /// tables can use the space.
    pub(crate) fn drop_end_reserve(&mut self) {
        let _ = self.reserve.take_at_end();
        self.drop_prepared();
    }

    /// Takes a cluster for the L2 table of an L1 entry.
    pub(crate) fn take_l2_table(&mut self, l1_index: usize) -> Step<u64> {
        let reserved = self.reserve.take_l2_table();
        reserved.ok_or(Blocked::NeedsReserve(ReserveRequest::L2Table(l1_index)))
    }

    /// Whether the reserve has a cluster for an L2 table.
    pub(crate) fn has_l2_table(&self) -> bool {
        self.reserve.has_l2_table()
    }

    /// Adds a cluster to the reserve: it was allocated for an L2 table, and the host has space for
    /// it.
    pub(crate) fn put_l2_table(&mut self, cluster: u64) {
        self.reserve.put_l2_table(cluster);
    }

    /// Begins to reserve `count` clusters at the end of the file; `None` if there is a reserve
    /// already.
    pub(crate) fn begin_end_reserve(
        &mut self,
        tables: &mut Tables,
        count: u64,
    ) -> Option<Range<u64>> {
        self.reserve.at_end().is_none().then(|| tables.file.reserve(count))
    }

    /// Adds these clusters at the end of the file to the reserve: the host has space for them.
    pub(crate) fn put_end_reserve(&mut self, clusters: Range<u64>) {
        self.space.note_written(clusters.end);
        self.reserve.put_at_end(clusters);
    }

    /// Adds these contiguous clusters to the reserve: they were allocated for metadata, and the
    /// host has space for them.
    pub(crate) fn put_row(&mut self, tables: &mut Tables, clusters: Range<u64>) {
        if let Some(unused) = self.reserve.take_row() {
            self.free_unlinked(tables, unused);
        }
        self.reserve.put_row(clusters);
    }

    /// Whether the file is known to have fewer clusters than `needed`.
    pub(crate) fn is_file_short(&self, needed: u64) -> bool {
        self.space.length() < needed
    }

    /// Records the result of extending the file to `length` clusters, of which `needed` are needed
    /// now. The file then has `size` bytes. If these are too few for `needed`, `size` becomes the
    /// limit, otherwise the limit is removed.
    pub(crate) fn note_extended(
        &mut self,
        geometry: Geometry,
        length: u64,
        needed: u64,
        size: u64,
    ) {
        self.space.set_length(length);
        let is_limited = size < geometry.offset_of(needed);
        self.space.set_limit(is_limited.then_some(size));
    }

    /// Removes the limit if the storage, of `size` bytes, has become longer than the limit, because
    /// such a storage grows by writes although it cannot be extended in advance. Returns whether
    /// the limit was removed.
    pub(crate) fn lift_limit(&mut self, size: u64) -> bool {
        let is_growing = self.space.limit().is_some_and(|limit| size > limit);
        if is_growing {
            self.space.set_limit(None);
        }
        is_growing
    }

    /// Whether a step that got ENOSPC at the end of the file, of `size` bytes, may find space
    /// elsewhere if it is repeated: in clusters that wait to be freed, or in clusters that were not
    /// scanned yet.
    pub(crate) fn may_have_space(&mut self, tables: &Tables, size: u64) -> bool {
        // With a limit, the next step scans all clusters that were not scanned. This is tried only
        // once: if the scan finds no space, the step fails.
        let is_unknown = self.space.limit().is_none()
            && !self.space.unscanned().is_empty()
            && size < tables.geometry().offset_of(tables.file.end() + 1);
        if is_unknown {
            self.space.set_limit(Some(size));
        }
        is_unknown || self.frees.gain() > 0
    }
}
