//! Locks guest clusters for pending changes, so that changes of the same cluster wait for each
//! other.
//!
//! A pending change locks its clusters: other changes of them wait until it is linked or aborted.
//! Overwrites in place run concurrently. A change that would remove the host cluster of an
//! overwrite waits for the end of the overwrite. Reads never wait: they see the old mapping until
//! the link.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use event_listener::{Event, EventListener};

use crate::qcow2::layout::entry::CompressedDescriptor;
use crate::qcow2::tables::{Blocked, Step};

/// The change that a link makes to the entries of clusters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// The entries refer to host clusters with data; `allocated` if these are new.
    Write { host: u64, allocated: bool },
    /// The entry refers to compressed data.
    Compressed(CompressedDescriptor),
    /// The clusters read as zeros. They keep their host clusters if `keep` is set.
    Zero { keep: bool },
    /// The clusters have no host cluster, and read as zeros if the image's version can encode this.
    Discard,
    /// The subclusters in `mask` of one cluster read as zeros. If no subcluster has data after the
    /// change, the entry no longer refers to a host cluster, unless `keep` is set.
    ZeroSubclusters { mask: u32, keep: bool },
}

/// A change between prepare and link.
pub(super) struct PendingChange {
    clusters: Range<u64>,
    change: Change,
    ended: Arc<Event>,
}

impl PendingChange {
    pub(super) fn clusters(&self) -> Range<u64> {
        self.clusters.clone()
    }

    pub(super) fn change(&self) -> &Change {
        &self.change
    }

    /// The event that signals the link or the abort.
    pub(super) fn listen(&self) -> EventListener {
        self.ended.listen()
    }
}

/// The pending changes and the overwrites in flight; see the module's documentation.
#[derive(Default)]
pub(super) struct PendingChanges {
    /// Keyed by the first cluster; the ranges do not overlap.
    changes: BTreeMap<u64, PendingChange>,
    /// The number of overwrites in place that are in flight, for each range of clusters.
    overwrites: HashMap<(u64, u64), u32>,
    overwrite_ended: Event,
}

impl PendingChanges {
    /// The end of the unlocked clusters from `first` on, at most `end`. If `first` itself is
    /// locked, the event to wait for.
    pub(super) fn unlocked_until(&self, first: u64, end: u64) -> Result<u64, EventListener> {
        if let Some((_, before)) = self.changes.range(..=first).next_back()
            && before.clusters.end > first
        {
            return Err(before.ended.listen());
        }
        let next = self.changes.range(first..end).next();
        Ok(next.map_or(end, |(&start, _)| start))
    }

    /// The event to wait for before these clusters can lose their host clusters, if they are being
    /// overwritten.
    pub(super) fn overwrites_of(&self, clusters: &Range<u64>) -> Option<EventListener> {
        let overlaps = |&(start, end): &(u64, u64)| start < clusters.end && clusters.start < end;
        self.overwrites.keys().any(overlaps).then(|| self.overwrite_ended.listen())
    }

    /// Whether neither changes nor overwrites are in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.changes.is_empty() && self.overwrites.is_empty()
    }

    pub(super) fn begin_overwrite(&mut self, clusters: Range<u64>) {
        *self.overwrites.entry((clusters.start, clusters.end)).or_insert(0) += 1;
    }

    pub(super) fn end_overwrite(&mut self, clusters: Range<u64>) {
        let key = (clusters.start, clusters.end);
        if let Some(count) = self.overwrites.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                self.overwrites.remove(&key);
                self.overwrite_ended.notify(usize::MAX);
            }
        }
    }

    /// Begins a change. A cluster has one change at a time: a second change waits for the first.
    pub(super) fn begin(&mut self, clusters: Range<u64>, change: Change) -> Step<()> {
        match self.changes.entry(clusters.start) {
            Entry::Occupied(other) => Err(Blocked::Wait(other.get().ended.listen())),
            Entry::Vacant(place) => {
                let ended = Arc::new(Event::new());
                place.insert(PendingChange { clusters, change, ended });
                Ok(())
            }
        }
    }

    /// The number of pending changes.
    pub(super) fn len(&self) -> usize {
        self.changes.len()
    }

    /// Any pending change.
    pub(super) fn first(&self) -> Option<&PendingChange> {
        self.changes.values().next()
    }

    pub(super) fn get(&self, first: u64) -> Option<&PendingChange> {
        self.changes.get(&first)
    }

    /// Ends a change, and wakes the tasks that wait for it.
    pub(super) fn end(&mut self, first: u64) -> Option<PendingChange> {
        let pending = self.changes.remove(&first)?;
        pending.ended.notify(usize::MAX);
        Some(pending)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHANGE: Change = Change::Discard;

    #[test]
    fn changes_have_their_clusters_alone() {
        let mut pending = PendingChanges::default();
        assert!(pending.begin(4..6, CHANGE).is_ok());
        assert_eq!(pending.unlocked_until(0, 10).ok(), Some(4));
        assert!(pending.unlocked_until(4, 10).is_err() && pending.unlocked_until(5, 6).is_err());
        assert_eq!(pending.unlocked_until(6, 10).ok(), Some(10));
        assert!(pending.end(4).is_some() && pending.end(4).is_none());
        assert_eq!(pending.unlocked_until(4, 10).ok(), Some(10));
    }

    #[test]
    fn clusters_are_in_use_until_the_last_overwrite_ended() {
        let mut pending = PendingChanges::default();
        pending.begin_overwrite(3..5);
        pending.begin_overwrite(3..5);
        assert!(pending.overwrites_of(&(5..9)).is_none());
        pending.end_overwrite(3..5);
        assert!(pending.overwrites_of(&(4..5)).is_some());
        pending.end_overwrite(3..5);
        assert!(pending.overwrites_of(&(0..9)).is_none());
    }
}
