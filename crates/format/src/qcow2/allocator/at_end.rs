//! Clusters at the end of the file, with the refcount blocks that count them.
//!
//! The space comes from the reserve: the host has allocated it, so that a writeback that writes these
//! tables never fails for want of space.

use std::ops::Range;

use blockhouse_core::{Error, ErrorKind};

use crate::qcow2::layout::limits::MAX_REFCOUNT_TABLE;
use crate::qcow2::tables::{Blocked, ReserveRequest, Step, Tables};

use super::deferred_free::DeferredFree;
use super::{Allocator, check_not_active};

/// What has to be placed together: refcount blocks, a refcount table, then what was asked for.
struct EndLayout {
    /// Which entries of the refcount table get a block.
    blocks: Vec<u64>,
    /// Clusters of a new refcount table, 0 for none.
    table: u64,
    total: u64,
}

impl Allocator {
    /// Allocates exactly `count` clusters in a row at the end, after the refcount blocks (and the larger
    /// refcount table) that counting them takes.
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
            let start = tables.file().end();
            let layout = plan(tables, start, count)?;
            let clusters = start..start + layout.total;
            tables.check_within_limits(clusters.end)?;
            match first_allocated(tables, clusters)? {
                Some(allocated) => tables.file_mut().advance(allocated + 1),
                None => return Err(Blocked::NeedsReserve(ReserveRequest::AtEnd(layout.total))),
            }
        }
    }

    /// Carries the layout out: refcount blocks, refcount table, then what was asked for.
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
            let old = tables.move_refcount_table(table_start..table_start + layout.table);
            self.defer_free(DeferredFree::of(old));
        }
        for (&index, cluster) in layout.blocks.iter().zip(start..) {
            tables.add_refcount_block(index, tables.geometry().offset_of(cluster));
        }
        self.reserve.take_at_end();
        tables.file_mut().unreserve(reserved.end, wanted.end);
        for cluster in start..wanted.end {
            tables.set_refcount(cluster, 1)?;
        }
        Ok(wanted)
    }
}

fn first_allocated(tables: &mut Tables, clusters: Range<u64>) -> Step<Option<u64>> {
    for cluster in clusters {
        if tables.refcount(cluster)? != 0 {
            return Ok(Some(cluster));
        }
    }
    Ok(None)
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
        layout.table = if entries > tables.refcount_table_entries() {
            // Half as much again, so that growing stays rare.
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
