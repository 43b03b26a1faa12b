//! Places that the host has given space for, and what a step may lack of them. See `make_room`.

use std::ops::Range;

/// What a step lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// So many clusters at the end, which nobody counts yet.
    AtEnd(u64),
    /// A file that has so many clusters, if it can be had.
    Length(u64),
    /// Clusters that wait to be freed: the host may give no others.
    Frees,
    /// A counted cluster for the L2 table of this L1 entry.
    L2Table(usize),
}

/// Places that the host has space for and that nothing uses yet.
#[derive(Default)]
pub(crate) struct Room {
    /// Behind everything else when they were claimed. Not counted.
    at_end: Option<Range<u64>>,
    /// For L2 tables. Counted once each.
    tables: Vec<u64>,
}

impl Room {
    pub(crate) fn at_end(&self) -> Option<Range<u64>> {
        self.at_end.clone()
    }

    pub(crate) fn put_at_end(&mut self, clusters: Range<u64>) {
        self.at_end = Some(clusters);
    }

    pub(crate) fn take_at_end(&mut self) -> Option<Range<u64>> {
        self.at_end.take()
    }

    pub(crate) fn has_table(&self) -> bool {
        !self.tables.is_empty()
    }

    pub(crate) fn put_table(&mut self, cluster: u64) {
        self.tables.push(cluster);
    }

    pub(crate) fn take_table(&mut self) -> Option<u64> {
        self.tables.pop()
    }
}
