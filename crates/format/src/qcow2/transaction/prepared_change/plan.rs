//! A prepared change of the snapshots, and its effect on the snapshot table.

use blockhouse_core::Result;

use crate::qcow2::layout::snapshot_table::SnapshotEntry;

use super::super::snapshots::{NewSnapshot, check_new_name, draft_entry, index_of};

/// The change that is prepared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SnapshotPlan {
    /// A snapshot is taken of the disk.
    Create(NewSnapshot),
    /// The snapshot of this name, or with this id, is deleted.
    Delete(String),
}

/// The purpose of the copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Clusters of the active tables get one more reference.
    Create,
    /// Clusters of a snapshot's tables lose one reference.
    Delete,
}

impl SnapshotPlan {
    pub(super) fn purpose(&self) -> Purpose {
        match self {
            Self::Create(_) => Purpose::Create,
            Self::Delete(_) => Purpose::Delete,
        }
    }

    /// Changes the snapshot table's `entries`, of a disk with this size and this many L1 entries.
    /// Returns the added or removed entry. A new entry is the last, and its L1 table has no offset
    /// yet.
    pub(super) fn change(
        &self,
        image: &str,
        disk_size: u64,
        l1_entries: usize,
        entries: &mut Vec<SnapshotEntry>,
    ) -> Result<SnapshotEntry> {
        match self {
            Self::Create(new) => {
                check_new_name(image, &new.name, entries)?;
                let entry = draft_entry(new, disk_size, entries, l1_entries as u32);
                entries.push(entry.clone());
                Ok(entry)
            }
            Self::Delete(name) => Ok(entries.remove(index_of(image, name, entries)?)),
        }
    }
}
