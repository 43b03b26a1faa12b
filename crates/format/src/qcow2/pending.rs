//! Guest clusters that somebody is about to change: who has to wait for whom.
//!
//! A change of the mapping (`pending`) has its clusters alone: other changes wait until it is committed
//! or aborted. Overwrites in place go side by side, and a change that would take the place away from
//! under them waits for their end. Reads never wait: until the commit they see the old mapping.
//!
//! A request takes its clusters in ascending order, so nobody waits in a circle.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use event_listener::{Event, EventListener};

use super::entry::{CompressedPlace, UnitState};

/// What becomes of the clusters on commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// They have their data in host clusters from here on; `taken` if these are new.
    Write { host: u64, taken: bool },
    /// It has its compressed data at this place from here on.
    Pack(CompressedPlace),
    /// They read as zeros; with their places or without.
    Zero { keep: bool },
    /// They have no place any more, and read as zeros if that can be said.
    Discard,
    /// The units `mask` of the one cluster get into `state`. Without any unit of data left the cluster
    /// loses its place, unless it is to `keep` it.
    Units { mask: u32, state: UnitState, keep: bool },
}

/// A prepared change.
pub(crate) struct Prepared {
    pub(crate) clusters: Range<u64>,
    pub(crate) change: Change,
    ended: Arc<Event>,
}

/// See the module's page.
#[derive(Default)]
pub(crate) struct Pending {
    /// By first cluster; they do not overlap.
    changes: BTreeMap<u64, Prepared>,
    /// Overwrites in place: clusters, and how many of them.
    overwrites: HashMap<(u64, u64), u32>,
    overwrite_ended: Event,
    /// Host clusters that an operation nobody waits for may still write to: never to be reused.
    pub(crate) haunted: HashSet<u64>,
}

impl Pending {
    /// The clusters from `first` on that nobody is changing, at most up to `end`; or whom to wait
    /// for, if that is none.
    pub(crate) fn free_from(&self, first: u64, end: u64) -> Result<u64, EventListener> {
        if let Some((_, before)) = self.changes.range(..=first).next_back()
            && before.clusters.end > first
        {
            return Err(before.ended.listen());
        }
        let next = self.changes.range(first..end).next();
        Ok(next.map_or(end, |(&start, _)| start))
    }

    /// Whom to wait for before the place of these clusters can be taken away.
    pub(crate) fn overwrites_of(&self, clusters: &Range<u64>) -> Option<EventListener> {
        let overlaps = |&(start, end): &(u64, u64)| start < clusters.end && clusters.start < end;
        self.overwrites.keys().any(overlaps).then(|| self.overwrite_ended.listen())
    }

    /// Whether nobody is changing anything.
    pub(crate) fn is_idle(&self) -> bool {
        self.changes.is_empty() && self.overwrites.is_empty()
    }

    pub(crate) fn begin_overwrite(&mut self, clusters: Range<u64>) {
        *self.overwrites.entry((clusters.start, clusters.end)).or_insert(0) += 1;
    }

    pub(crate) fn end_overwrite(&mut self, clusters: Range<u64>) {
        let key = (clusters.start, clusters.end);
        if let Some(count) = self.overwrites.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                self.overwrites.remove(&key);
                self.overwrite_ended.notify(usize::MAX);
            }
        }
    }

    pub(crate) fn begin(&mut self, clusters: Range<u64>, change: Change) {
        let first = clusters.start;
        let prepared = Prepared { clusters, change, ended: Arc::new(Event::new()) };
        let other = self.changes.insert(first, prepared);
        assert!(other.is_none(), "two changes of one cluster at a time");
    }

    /// How many changes are under way.
    pub(crate) fn changes(&self) -> usize {
        self.changes.len()
    }

    pub(crate) fn get(&self, first: u64) -> Option<&Prepared> {
        self.changes.get(&first)
    }

    /// Ends a change and lets those go on who wait for it.
    pub(crate) fn end(&mut self, first: u64) -> Option<Prepared> {
        let prepared = self.changes.remove(&first)?;
        prepared.ended.notify(usize::MAX);
        Some(prepared)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHANGE: Change = Change::Discard;

    #[test]
    fn changes_have_their_clusters_alone() {
        let mut pending = Pending::default();
        pending.begin(4..6, CHANGE);
        assert_eq!(pending.free_from(0, 10).ok(), Some(4));
        assert!(pending.free_from(4, 10).is_err() && pending.free_from(5, 6).is_err());
        assert_eq!(pending.free_from(6, 10).ok(), Some(10));
        assert!(pending.end(4).is_some() && pending.end(4).is_none());
        assert_eq!(pending.free_from(4, 10).ok(), Some(10));
    }

    #[test]
    fn a_place_is_in_use_until_its_last_overwrite_ended() {
        let mut pending = Pending::default();
        pending.begin_overwrite(3..5);
        pending.begin_overwrite(3..5);
        assert!(pending.overwrites_of(&(5..9)).is_none());
        pending.end_overwrite(3..5);
        assert!(pending.overwrites_of(&(4..5)).is_some());
        pending.end_overwrite(3..5);
        assert!(pending.overwrites_of(&(0..9)).is_none());
    }
}
