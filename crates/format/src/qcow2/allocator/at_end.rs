//! Allocates clusters at the end of the file, with the refcount blocks that count them.
//!
//! The space comes from the reserve. The host has allocated the space, so a writeback of these
//! tables never fails with ENOSPC.

use std::ops::Range;

use blockhouse_core::{Error, ErrorKind};

use crate::qcow2::layout::limits::MAX_REFCOUNT_TABLE;
use crate::qcow2::tables::{Blocked, ReserveRequest, Scan, Step, Tables};

use super::deferred_free::DeferredFree;
use super::rows::{Room, RowSearch, first_allocated};
use super::{Allocator, check_not_active, mark_allocated};

/// The parts that are placed together: refcount blocks, a refcount table, then the requested
/// clusters.
struct EndLayout {
    /// Indexes of the refcount table entries for which a refcount block is added.
    blocks: Vec<u64>,
    /// Clusters of a new refcount table, 0 for none.
    table: u64,
    total: u64,
}

impl Allocator {
    /// Allocates exactly `count` clusters in a row at the end, after the refcount blocks and the
    /// larger refcount table that are needed to count them.
    pub(crate) fn allocate_at_end(&mut self, tables: &mut Tables, count: u64) -> Step<Range<u64>> {
        if let Some(reserved) = self.reserve.at_end() {
            let layout = plan(tables, reserved.start, count)?;
            let is_useful = count > 0 || !layout.blocks.is_empty();
            let clusters = reserved.start..reserved.start + layout.total;
            let fits = clusters.end <= reserved.end;
            if is_useful && fits && first_allocated(tables, clusters)?.is_none() {
                return self.place_metadata(tables, reserved, &layout, count);
            }
            self.reserve.take_at_end();
        }
        loop {
            let start = tables.file.end();
            let layout = plan(tables, start, count)?;
            let clusters = start..start + layout.total;
            tables.check_within_limits(clusters.end)?;
            match first_allocated(tables, clusters)? {
                Some(allocated) => tables.file.advance(allocated + 1),
                None => return Err(Blocked::NeedsReserve(ReserveRequest::AtEnd(layout.total))),
            }
        }
    }

    /// Places the layout: refcount blocks, refcount table, then the requested clusters.
    fn place_metadata(
        &mut self,
        tables: &mut Tables,
        reserved: Range<u64>,
        layout: &EndLayout,
        count: u64,
    ) -> Step<Range<u64>> {
        let start = reserved.start;
        let table_start = start + layout.blocks.len() as u64;
        let wanted = table_start + layout.table..table_start + layout.table + count;
        check_not_active(tables, start..wanted.end)?;
        if layout.table > 0 {
            let old = tables.refcounts().move_table(table_start..table_start + layout.table);
            self.frees.defer(DeferredFree::of(old));
        }
        for (&index, cluster) in layout.blocks.iter().zip(start..) {
            let offset = tables.geometry().offset_of(cluster);
            tables.refcounts().add_block(index, offset)?;
        }
        self.reserve.take_at_end();
        tables.file.unreserve(reserved.end, wanted.end);
        for cluster in start..wanted.end {
            tables.refcounts().set(cluster, 1)?;
        }
        Ok(wanted)
    }
}

impl Allocator {
    /// Allocates exactly `count` clusters in a row for a table: at the end, or elsewhere if the end
    /// has no space. All refcounts must be correct.
    pub(crate) fn allocate_row(&mut self, tables: &mut Tables, count: u64) -> Step<Range<u64>> {
        if let Some(row) = self.reserve.take_row() {
            let wanted = if count <= row.end - row.start { count } else { 0 };
            let taken = row.start..row.start + wanted;
            self.free_unlinked(tables, taken.end..row.end);
            if !taken.is_empty() {
                return Ok(taken);
            }
        }
        let allocated = self.allocate_at_end(tables, count);
        allocated.map_err(|blocked| match blocked {
            Blocked::NeedsReserve(ReserveRequest::AtEnd(total)) => {
                Blocked::NeedsReserve(ReserveRequest::Row { count, total })
            }
            other => other,
        })
    }

    /// Looks for `count` free clusters in a row that existing refcount blocks cover. Skips clusters
    /// taken from the end of the file, which may be in use without being counted.
    pub(crate) fn find_room(&mut self, tables: &mut Tables, count: u64) -> Step<Room> {
        let end = self.space.scan_end();
        while self.rows.at < end {
            let RowSearch { start, at } = self.rows;
            match tables.refcounts().scan(at, (start + count - at).min(end - at))? {
                Scan::Free(clusters) => self.rows.at = clusters.end,
                Scan::Allocated(count) => self.rows.go_to(at + count),
                Scan::NoRefcountBlock => {
                    let in_block = tables.geometry().block_refcounts();
                    let index = at / in_block;
                    let later =
                        tables.refcount_table().words().get(index as usize..).unwrap_or_default();
                    match later.iter().position(|&word| word != 0) {
                        Some(gap) => self.rows.go_to((index + gap as u64) * in_block),
                        None => {
                            self.rows.go_to(end);
                            let is_lower = self.lower_end(tables, start);
                            return Ok(if is_lower { Room::End } else { Room::None });
                        }
                    }
                }
            }
            let RowSearch { start, at } = self.rows;
            if at - start < count {
                continue;
            }
            // Other allocations may have taken some of the clusters since the scan. This check also
            // loads the refcounts of free clusters into the cache, so that a row is allocated
            // entirely or not at all.
            match first_allocated(tables, start..at)? {
                Some(allocated) => self.rows.go_to(allocated + 1),
                None => {
                    self.rows.go_to(at);
                    return mark_allocated(tables, start..at).map(Room::Row);
                }
            }
        }
        Ok(Room::None)
    }

    /// Lowers the file's end to `cluster`, or to the end of the last active table if that is later.
    /// All refcounts from `cluster` on were zero when they were scanned. Returns whether the end is
    /// lower: it stays if clusters were already taken from it.
    pub(super) fn lower_end(&mut self, tables: &mut Tables, cluster: u64) -> bool {
        let last = tables.active.iter().max().map_or(0, |&last| last + 1);
        let cluster = cluster.max(last);
        let is_lower = tables.file.lower(cluster);
        if is_lower {
            self.space.end_at(cluster);
        }
        is_lower
    }
}

fn plan(tables: &Tables, start: u64, count: u64) -> Result<EndLayout, Error> {
    let geometry = tables.geometry();
    let in_block = geometry.block_refcounts();
    let mut layout = EndLayout { blocks: Vec::new(), table: 0, total: count.max(1) };
    loop {
        let last = (start + layout.total - 1) / in_block;
        layout.blocks.clear();
        for index in start / in_block..=last {
            if tables.refcount_block(index)?.is_none() {
                layout.blocks.push(index);
            }
        }
        let entries = last + 1;
        layout.table = if entries > tables.refcount_table().len() as u64 {
            // The new table has 1.5 times as many entries as needed, so that it is rarely replaced.
            let wanted = geometry.clusters_for((entries + entries / 2) * 8);
            wanted.min(MAX_REFCOUNT_TABLE >> geometry.cluster_bits)
        } else {
            0
        };
        if layout.table > 0 && layout.table << geometry.cluster_bits < entries * 8 {
            let what = "the refcount table is as large as its format allows";
            return Err(Error::new(ErrorKind::NoSpace, what).on(tables.name()));
        }
        let total = (layout.blocks.len() as u64 + layout.table + count).max(1);
        if total <= layout.total {
            return Ok(layout);
        }
        layout.total = total;
    }
}
