//! Clusters that the host has allocated ahead of new metadata.
//!
//! A new table reaches the disk with a writeback, long after the request that made it. If that
//! writeback hit ENOSPC, no writeback could complete, and clusters are freed only after a
//! writeback. So the space of each new table is filled with zeros first, and ENOSPC fails the
//! request that needs the table.

use std::ops::Range;

/// Reserved clusters that no metadata uses yet.
#[derive(Default)]
pub(crate) struct Reserve {
    /// Clusters at the end of the file, after all clusters that were in use when they were
    /// reserved. Their refcounts are zero.
    at_end: Option<Range<u64>>,
    /// Contiguous clusters in the middle of a storage that has no space at its end. Each has a
    /// refcount of one.
    row: Option<Range<u64>>,
    /// Clusters for L2 tables. Each has a refcount of one.
    l2_tables: Vec<u64>,
}

impl Reserve {
    pub(crate) fn at_end(&self) -> Option<Range<u64>> {
        self.at_end.clone()
    }

    pub(crate) fn put_at_end(&mut self, clusters: Range<u64>) {
        self.at_end = Some(clusters);
    }

    pub(crate) fn take_at_end(&mut self) -> Option<Range<u64>> {
        self.at_end.take()
    }

    pub(crate) fn put_row(&mut self, clusters: Range<u64>) {
        self.row = Some(clusters);
    }

    pub(crate) fn take_row(&mut self) -> Option<Range<u64>> {
        self.row.take()
    }

    pub(crate) fn has_l2_table(&self) -> bool {
        !self.l2_tables.is_empty()
    }

    pub(crate) fn put_l2_table(&mut self, cluster: u64) {
        self.l2_tables.push(cluster);
    }

    pub(crate) fn take_l2_table(&mut self) -> Option<u64> {
        self.l2_tables.pop()
    }
}
