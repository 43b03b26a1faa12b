//! The content of one record of the redo log, and its words.

use std::ops::Range;

use crate::qcow2::layout::entry::{Entry, Reference};
use crate::qcow2::layout::geometry::Geometry;

/// First cluster; kind and count; the L2 entry's two words.
pub(super) const WORDS_PER_RECORD: usize = 4;

/// Kinds of records, in the upper half of the second word. The lower half counts clusters.
const SET: u64 = 1;
const ZERO_KEEPING_HOST: u64 = 2;

/// The change of the entries of consecutive guest clusters. A second application changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RedoChange {
    /// The first cluster has this entry. Each further cluster has the same entry with the next host
    /// cluster.
    Set(Entry),
    /// Each cluster reads as zeros, and keeps its host cluster if the host cluster's refcount is
    /// one.
    ZeroKeepingHost,
}

/// A change of the entries of `clusters`, which are not empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RedoRecord {
    pub(crate) clusters: Range<u64>,
    pub(crate) change: RedoChange,
}

impl RedoChange {
    /// The same change for the clusters from the `count`-th on.
    pub(super) fn skip(self, count: u64, geometry: Geometry) -> Self {
        match self {
            Self::Set(entry) => Self::Set(nth_entry(entry, count, geometry)),
            Self::ZeroKeepingHost => self,
        }
    }

    /// The new entry of the `index`-th cluster, whose entry before is `old`.
    pub(crate) fn entry(self, index: u64, old: Entry, geometry: Geometry) -> Entry {
        match self {
            Self::Set(entry) => nth_entry(entry, index, geometry),
            Self::ZeroKeepingHost => old.zeroed_keeping_host(),
        }
    }
}

/// The entry of the `index`-th cluster, if all clusters have the entry `first` with consecutive
/// host clusters.
fn nth_entry(first: Entry, index: u64, geometry: Geometry) -> Entry {
    match first {
        Entry::Standard { host: Some(host), subclusters } => {
            let offset = host.offset + geometry.offset_of(index);
            Entry::Standard { host: Some(Reference { offset, ..host }), subclusters }
        }
        Entry::Standard { host: None, .. } | Entry::Compressed(_) => first,
    }
}

impl RedoRecord {
    /// The record as it is stored.
    pub(super) fn words(&self, geometry: Geometry) -> [u64; WORDS_PER_RECORD] {
        let count = self.clusters.end - self.clusters.start;
        let (kind, entry) = match self.change {
            RedoChange::Set(entry) => (SET, entry.words(geometry)),
            RedoChange::ZeroKeepingHost => (ZERO_KEEPING_HOST, [0; 2]),
        };
        [self.clusters.start, kind << 32 | count, entry[0], entry[1]]
    }

    /// From stored words.
    ///
    /// # Errors
    /// The mistake in the words, as a text.
    pub(super) fn from_words(
        words: [u64; WORDS_PER_RECORD],
        geometry: Geometry,
    ) -> Result<Self, String> {
        let [start, kind, first, second] = words;
        let (kind, count) = (kind >> 32, kind & u64::from(u32::MAX));
        let end = start.checked_add(count).filter(|&end| end <= geometry.cluster_of(u64::MAX));
        let Some(end) = end.filter(|_| count > 0) else {
            return Err(format!("is about {count} clusters from cluster {start} on"));
        };
        let change = match kind {
            SET => RedoChange::Set(
                Entry::from_words([first, second], geometry)
                    .map_err(|why| format!("has an entry that {why}"))?,
            ),
            ZERO_KEEPING_HOST => RedoChange::ZeroKeepingHost,
            _ => return Err(format!("is of the unknown kind {kind}")),
        };
        Ok(Self { clusters: start..end, change })
    }
}

/// Collects the new entries of consecutive clusters into as few records as possible.
#[derive(Default)]
pub(crate) struct EntryRun {
    record: Option<RedoRecord>,
}

impl EntryRun {
    /// Adds the entry of the next cluster. Returns the previous record if the entry does not
    /// continue this record.
    pub(crate) fn push(
        &mut self,
        cluster: u64,
        entry: Entry,
        geometry: Geometry,
    ) -> Option<RedoRecord> {
        if let Some(record) = &mut self.record
            && let RedoChange::Set(first) = record.change
            && !matches!(first, Entry::Compressed(_))
            && nth_entry(first, cluster - record.clusters.start, geometry) == entry
        {
            record.clusters.end = cluster + 1;
            return None;
        }
        let change = RedoChange::Set(entry);
        self.record.replace(RedoRecord { clusters: cluster..cluster + 1, change })
    }

    /// The last record.
    pub(crate) fn finish(self) -> Option<RedoRecord> {
        self.record
    }
}
