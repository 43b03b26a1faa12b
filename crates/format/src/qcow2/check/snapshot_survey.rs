//! Reads the snapshot table of an image that is not open, even if the table is damaged: finds the
//! snapshots that can still be used, and the faults of the others.
//!
//! A snapshot is usable if its entry is valid and its L1 table can be at the entry's offset. If an
//! entry's length is unknown, the offsets of the entries after it are unknown, too.

use blockhouse_core::{Result, Storage};

use crate::qcow2::layout::geometry::Geometry;
use crate::qcow2::layout::header::Header;
use crate::qcow2::layout::limits::{MAX_L1_BYTES, MAX_OFFSET, MAX_SNAPSHOTS};
use crate::qcow2::layout::snapshot_table::{SnapshotEntry, TableReader};

/// The offset and length of an L1 table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct L1Location {
    pub(crate) offset: u64,
    pub(crate) entries: u32,
}

impl L1Location {
    /// The active L1 table.
    pub(crate) fn active(header: &Header) -> Self {
        Self { offset: header.l1_offset, entries: header.l1_entries }
    }

    pub(crate) fn of(snapshot: &SnapshotEntry) -> Self {
        Self { offset: snapshot.l1_offset, entries: snapshot.l1_entries }
    }

    pub(crate) fn length(self) -> u64 {
        u64::from(self.entries) * 8
    }

    /// Whether a table can have this location and length.
    pub(crate) fn is_possible(self, geometry: Geometry) -> bool {
        self.length() <= MAX_L1_BYTES
            && self.offset <= MAX_OFFSET
            && geometry.is_cluster_aligned(self.offset)
    }

    /// Whether the whole table is in the file.
    pub(crate) fn is_in<S: Storage>(self, storage: &S, geometry: Geometry) -> bool {
        self.is_possible(geometry) && self.offset + self.length() <= storage.size()
    }

    /// The clusters of a possible table.
    pub(crate) fn clusters(self, geometry: Geometry) -> std::ops::Range<u64> {
        geometry.cluster_of(self.offset)..geometry.clusters_for(self.offset + self.length())
    }
}

/// The fault of a part of the snapshot table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// The number of entries that are affected.
    pub(crate) count: u64,
    pub(crate) what: String,
}

/// The content of the snapshot table.
pub(crate) struct SnapshotSurvey {
    /// The snapshots that can be used.
    pub(crate) usable: Vec<SnapshotEntry>,
    /// The faults.
    pub(crate) faults: Vec<Fault>,
    /// Whether the snapshots in `usable` are the first ones of the table on disk, without a gap or
    /// a change.
    pub(crate) is_prefix: bool,
    /// Bytes of the table up to its last readable entry.
    pub(crate) length: u64,
    /// Locations of the L1 tables of snapshots that cannot be used.
    pub(crate) unusable_l1_tables: Vec<L1Location>,
}

impl SnapshotSurvey {
    /// Reads the snapshot table.
    ///
    /// # Errors
    /// Errors of the storage only.
    pub(crate) async fn read<S: Storage>(storage: &S, header: &Header) -> Result<Self> {
        let mut survey = Self {
            usable: Vec::new(),
            faults: Vec::new(),
            is_prefix: true,
            length: 0,
            unusable_l1_tables: Vec::new(),
        };
        if header.snapshots > 0 && !header.has_possible_snapshot_table() {
            let offset = header.snapshots_offset;
            let what = format!("the snapshot table has the invalid offset {offset}");
            survey.lose_all(header.snapshots.into(), what);
            return Ok(survey);
        }
        survey.read_entries(storage, header).await?;
        let beyond = u64::from(header.snapshots).saturating_sub(u64::from(MAX_SNAPSHOTS));
        if beyond > 0 {
            let what = format!("snapshots are more than {MAX_SNAPSHOTS}");
            survey.lose_all(beyond, what);
        }
        Ok(survey)
    }

    /// Locations of the L1 tables of the usable snapshots.
    pub(crate) fn l1_tables(&self) -> impl Iterator<Item = L1Location> {
        self.usable.iter().map(L1Location::of)
    }

    /// Records that the last `count` entries are lost.
    fn lose_all(&mut self, count: u64, why: String) {
        self.faults.push(Fault { count, what: format!("{count} snapshots cannot be used: {why}") });
    }

    /// Records that an entry is lost or has to be changed.
    fn fault(&mut self, what: String) {
        self.is_prefix = false;
        self.faults.push(Fault { count: 1, what });
    }

    async fn read_entries<S: Storage>(&mut self, storage: &S, header: &Header) -> Result<()> {
        let count = header.snapshots.min(MAX_SNAPSHOTS);
        let mut reader = TableReader::new(storage, header.snapshots_offset);
        let mut empty = 0;
        for number in 0..count {
            let left = u64::from(count - number);
            let Some(entry) = reader.next().await? else {
                let what = format!("the snapshot table ends before entry {number}");
                self.lose_all(left, what);
                break;
            };
            let Some(mut entry) = entry else {
                let offset = header.snapshots_offset + reader.position();
                let what =
                    format!("the entry at offset {offset} of the snapshot table is too long");
                self.lose_all(left, what);
                break;
            };
            self.length = reader.position();
            if entry.is_empty() {
                empty += 1;
                continue;
            }
            // An entry after an empty one does not directly follow the usable entries before it.
            self.is_prefix &= empty == 0;
            match fault_of(&entry, header, storage.size()) {
                Some(why) => {
                    self.unusable_l1_tables.push(L1Location::of(&entry));
                    self.fault(format!("{} cannot be used: {why}", entry.called()));
                }
                None => {
                    if reader.was_guessed() {
                        let what = "has extra data of an invalid length";
                        self.fault(format!("{} {what}", entry.called()));
                    } else if entry.is_incomplete(header.geometry.version) {
                        self.fault(format!("{} does not say the size of its disk", entry.called()));
                        entry.complete(header.size);
                    }
                    self.usable.push(entry);
                }
            }
        }
        if empty > 0 {
            let what = format!("{empty} entries of the snapshot table are empty");
            self.faults.push(Fault { count: empty, what });
        }
        Ok(())
    }
}

/// The reason why a snapshot cannot be used; `None` if it can be used.
fn fault_of(entry: &SnapshotEntry, header: &Header, file_size: u64) -> Option<String> {
    let (geometry, place) = (header.geometry, L1Location::of(entry));
    let snapshot_table = geometry.cluster_of(header.snapshots_offset);
    if !place.is_possible(geometry) || (place.entries > 0 && place.offset == 0) {
        let (entries, offset) = (place.entries, place.offset);
        return Some(format!("its L1 table cannot have {entries} entries at offset {offset}"));
    }
    if place.entries == 0 {
        return None;
    }
    let clusters = place.clusters(geometry);
    if clusters.end > geometry.clusters_for(file_size) {
        let offset = place.offset;
        return Some(format!("its L1 table at offset {offset} is past the end of the file"));
    }
    let refcounts = geometry.cluster_of(header.refcount_table_offset);
    let refcounts = refcounts..refcounts + u64::from(header.refcount_table_clusters);
    let taken = [snapshot_table..snapshot_table + 1, refcounts];
    let overlaps =
        |other: &std::ops::Range<u64>| clusters.start < other.end && other.start < clusters.end;
    taken.iter().any(overlaps).then(|| {
        let offset = place.offset;
        format!("its L1 table at offset {offset} overlaps another table")
    })
}
