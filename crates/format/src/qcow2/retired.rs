//! Clusters that are counted once too often: references to them have left the tables.

use std::ops::Range;

/// Whether the host file gets the space back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Punch {
    /// It stays for the next allocation.
    No,
    /// It becomes a hole.
    Yes,
}

/// Clusters that are counted once too often.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Retired {
    pub(crate) clusters: Range<u64>,
    pub(crate) punch: Punch,
}

impl Retired {
    /// Puts them at the end of a list.
    pub(crate) fn join(self, list: &mut Vec<Self>) {
        match list.last_mut() {
            Some(last) if last.punch == self.punch && last.clusters.end == self.clusters.start => {
                last.clusters.end = self.clusters.end;
            }
            _ => list.push(self),
        }
    }
}
