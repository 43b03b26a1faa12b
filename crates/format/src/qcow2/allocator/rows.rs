//! Clusters in a row in the middle of a file, for tables where the end has no space: a block
//! device, an export of another server, or a host that is full.
//!
//! The search continues where the last one stopped, and includes clusters that became free since.

use std::ops::Range;

use crate::qcow2::tables::{Step, Tables};

/// How far before a cluster that became free a row may begin that it makes long enough.
const LOOK_BACK: u64 = 4096;

/// Where the search is: it saw free clusters from `start` on up to `at`.
#[derive(Default)]
pub(super) struct RowSearch {
    pub(super) start: u64,
    pub(super) at: u64,
}

impl RowSearch {
    /// The cluster became free.
    pub(super) fn note_free(&mut self, cluster: u64) {
        if cluster < self.at {
            self.go_to(cluster.saturating_sub(LOOK_BACK));
        }
    }

    pub(super) fn go_to(&mut self, cluster: u64) {
        (self.start, self.at) = (cluster, cluster);
    }
}

/// The result of the search.
pub(crate) enum Room {
    /// These clusters, which are allocated now.
    Row(Range<u64>),
    /// Nothing is in use from some cluster on: the end is there.
    End,
    /// Nothing.
    None,
}

pub(super) fn first_allocated(tables: &mut Tables, clusters: Range<u64>) -> Step<Option<u64>> {
    for cluster in clusters {
        if tables.refcounts().get(cluster)? != 0 {
            return Ok(Some(cluster));
        }
    }
    Ok(None)
}
