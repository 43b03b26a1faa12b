//! Places refcount blocks in the middle of a file that cannot grow, because it is a block device or
//! because the host is full.
//!
//! An image may lack refcounts on disk, because a process that died had them only in memory. No
//! table on disk refers to the refcount blocks that the dead process had allocated, so their
//! clusters are free. As refcounts are missing, the caller of [`Gaps`] tells which other clusters
//! are in use: those that a new count of all references found, or those that the redo log names.

use blockhouse_core::{Error, ErrorKind};

use crate::qcow2::tables::{Step, Tables};

use super::Allocator;

/// A search for unused clusters, from the start of the file on.
pub(crate) struct Gaps<'a> {
    /// Whether a cluster is in use, whatever its refcount is.
    is_taken: &'a (dyn Fn(u64) -> bool + Send + Sync),
    /// The clusters not searched yet, all of them entirely in the file.
    rest: std::ops::Range<u64>,
}

impl<'a> Gaps<'a> {
    /// A search of a file with `clusters` whole clusters.
    pub(crate) fn new(clusters: u64, is_taken: &'a (dyn Fn(u64) -> bool + Send + Sync)) -> Self {
        Self { is_taken, rest: 0..clusters }
    }
}

impl Allocator {
    /// Places the refcount block for `cluster` in an unused cluster that the block itself or an
    /// existing block covers. The new block has no refcount, except that of its own cluster if the
    /// block covers this cluster.
    pub(crate) fn place_block_in_gap(
        &mut self,
        tables: &mut Tables,
        cluster: u64,
        gaps: &mut Gaps<'_>,
    ) -> Step<()> {
        let geometry = tables.geometry();
        let index = geometry.refcount_index(cluster).table_index;
        if tables.refcount_block(index)?.is_some() {
            return Ok(());
        }
        let is_in_table = index < tables.refcount_table().len() as u64;
        while is_in_table && let Some(gap) = gaps.rest.clone().next() {
            let counted_by = geometry.refcount_index(gap).table_index;
            if counted_by != index && tables.refcount_block(counted_by)?.is_none() {
                // Neither the new block nor an existing one counts this cluster, so a second new
                // block would be needed.
                gaps.rest.start = (counted_by + 1) * geometry.block_refcounts();
                continue;
            }
            let is_used = tables.refcounts().get(gap)? != 0
                || (gaps.is_taken)(gap)
                || tables.active.contains(&gap);
            if !is_used {
                tables.refcounts().add_block(index, geometry.offset_of(gap))?;
                tables.refcounts().set(gap, 1)?;
                gaps.rest.start += 1;
                return Ok(());
            }
            gaps.rest.start += 1;
        }
        let what = "no cluster is left for a refcount block";
        Err(Error::new(ErrorKind::NoSpace, what).on(tables.name()).into())
    }
}
