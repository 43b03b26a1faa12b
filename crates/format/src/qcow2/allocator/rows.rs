//! Contiguous clusters (a row) in the middle of a file, for tables when the end of the file has no
//! space: on a block device, on an export of another server, or on a full host.
//!
//! The search continues where the last one stopped, and includes clusters that became free since.

use std::ops::Range;

use crate::qcow2::tables::{Step, Tables};

/// The number of clusters before a newly free cluster at which the search resumes, because the free
/// cluster may complete a row that begins before it.
const LOOK_BACK: u64 = 4096;

/// The position of the search: all clusters from `start` up to `at` were free.
#[derive(Default)]
pub(super) struct RowSearch {
    pub(super) start: u64,
    pub(super) at: u64,
}

impl RowSearch {
    /// Records that a cluster became free.
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
    /// These clusters were found, and are now allocated.
    Row(Range<u64>),
    /// All clusters from some cluster on are free, so the end of the file has space now.
    End,
    /// There is no such row.
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
