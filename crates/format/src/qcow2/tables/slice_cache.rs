//! The cache of slices: parts of L2 tables and refcount blocks, in their on-disk form.
//!
//! The states of a slice, and the capacity of the cache:
//!
//! 1. Absent. One task reads the slice; other tasks that need the slice wait for this task.
//! 2. Clean. A newly read slice replaces a clean slice that was not used since the clock hand
//!    passed.
//! 3. Dirty: entries differ from the disk. The slice is not replaced. Steps that would make more
//!    slices dirty wait for a writeback when more than half of the capacity is dirty.
//! 4. Under writeback: a copy is being written; entries that change meanwhile are dirty again.
//! 5. Clean again when the writeback is durable; dirty again if it failed.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use event_listener::{Event, EventListener};

use crate::CacheCounts;

/// A set of groups of a slice's entries, as [`Slice::group_of`] numbers them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entries([u64; 8]);

impl Entries {
    pub(crate) fn is_empty(self) -> bool {
        self == Self::default()
    }

    pub(crate) fn contains(self, index: usize) -> bool {
        self.0[index / 64] >> (index % 64) & 1 == 1
    }

    pub(crate) fn insert(&mut self, index: usize) {
        self.0[index / 64] |= 1 << (index % 64);
    }

    pub(crate) fn merge(&mut self, other: Self) {
        for (word, more) in self.0.iter_mut().zip(other.0) {
            *word |= more;
        }
    }
}

/// The structure that a slice is a part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SliceKind {
    /// An L2 table.
    L2,
    /// A refcount block.
    Refcounts,
}

/// A slice and its offset in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SliceId {
    pub(crate) offset: u64,
    pub(crate) kind: SliceKind,
}

impl SliceId {
    /// A slice of an L2 table.
    pub(crate) fn l2(offset: u64) -> Self {
        Self { offset, kind: SliceKind::L2 }
    }
}

/// A cached slice.
pub(crate) struct Slice {
    pub(crate) kind: SliceKind,
    pub(crate) bytes: Box<[u8]>,
    /// Entries that changed since the last writeback copied the slice.
    dirty: Entries,
    /// Entries that a running writeback is writing.
    writeback: Entries,
    /// Entries that are dirty or under writeback, and refer to data that is not stable before a
    /// flush.
    unstable: Entries,
    used: bool,
    /// Whether the slice was not looked up since it was read.
    is_new: bool,
    /// The step that used the slice last.
    step: u64,
}

impl Slice {
    /// Whether the `index`-th entry, or another entry of its group, may differ from the disk.
    pub(crate) fn is_dirty(&self, index: usize) -> bool {
        let group = self.group_of(index);
        self.dirty.contains(group) || self.writeback.contains(group)
    }

    /// The group of the `index`-th entry. All refcounts are one group. An L2 entry is a group of
    /// its own in a slice of up to 4 KiB, and shares a group in a larger slice.
    fn group_of(&self, index: usize) -> usize {
        match self.kind {
            SliceKind::Refcounts => 0,
            SliceKind::L2 => index / (self.bytes.len() / 4096).max(1),
        }
    }

    fn is_clean(&self) -> bool {
        self.dirty.is_empty() && self.writeback.is_empty()
    }
}

/// Whether the data that a dirty entry refers to needs a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DataStability {
    /// The data is stable, or the entry refers to no data.
    Stable,
    /// The data may be in a volatile cache.
    Unstable,
}

/// The cache of slices.
pub(crate) struct SliceCache {
    slots: Vec<(u64, Slice)>,
    index: HashMap<u64, usize>,
    /// The clock hand: where the search for a slice to replace continues.
    hand: usize,
    capacity: usize,
    /// Offsets of the dirty slices.
    dirty: BTreeSet<u64>,
    loading: HashMap<u64, Arc<Event>>,
    step: u64,
    counts: CacheCounts,
}

/// The way to get a slice that is not cached.
pub(crate) enum Fetch {
    /// The caller reads the slice, then passes it to [`SliceCache::loaded`].
    Read(Arc<Event>),
    /// Another task is reading the slice.
    Wait(EventListener),
    /// Another task has read the slice.
    Present,
}

/// The copy of one slice for a writeback.
pub(crate) struct SliceCopy {
    pub(crate) id: SliceId,
    pub(crate) bytes: Box<[u8]>,
    /// Whether the data of an entry needs a flush before the slice is written.
    pub(crate) stability: DataStability,
}

impl SliceCache {
    /// A cache of `capacity` slices.
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            slots: Vec::new(),
            index: HashMap::new(),
            hand: 0,
            capacity,
            dirty: BTreeSet::new(),
            loading: HashMap::new(),
            step: 0,
            counts: CacheCounts::default(),
        }
    }

    /// An empty cache of the same capacity, with the same counts.
    pub(crate) fn emptied(&self) -> Self {
        Self { counts: self.counts, ..Self::new(self.capacity) }
    }

    /// Begins a step. Slices that the step uses stay cached until the next step.
    pub(crate) fn begin_step(&mut self) {
        self.step += 1;
    }

    pub(crate) fn get(&mut self, offset: u64) -> Option<&Slice> {
        let slice = &mut self.slots[*self.index.get(&offset)?].1;
        (slice.used, slice.step) = (true, self.step);
        Some(slice)
    }

    /// The bytes of a cached slice. This does not count as a use of the slice.
    pub(crate) fn peek(&self, offset: u64) -> Option<&[u8]> {
        Some(&self.slots[*self.index.get(&offset)?].1.bytes)
    }

    /// As [`get`](Self::get), for a step that needs the slice. Counts a miss if the slice has just
    /// been read, otherwise a hit.
    pub(crate) fn look_up(&mut self, offset: u64) -> Option<&Slice> {
        let slot = *self.index.get(&offset)?;
        if std::mem::take(&mut self.slots[slot].1.is_new) {
            self.counts.misses += 1
        } else {
            self.counts.hits += 1
        }
        self.get(offset)
    }

    /// The numbers of hits and misses.
    pub(crate) fn counts(&self) -> CacheCounts {
        self.counts
    }

    /// The bytes of a cached slice, to change its `index`-th entry.
    ///
    /// # Panics
    /// When the slice is not cached.
    pub(crate) fn change(
        &mut self,
        offset: u64,
        index: usize,
        stability: DataStability,
    ) -> &mut [u8] {
        let slice = &mut self.slots[self.index[&offset]].1;
        let group = slice.group_of(index);
        (slice.used, slice.step) = (true, self.step);
        slice.dirty.insert(group);
        // An entry that was unstable before remains unstable, because its host cluster must exist
        // in the file even if the entry now reads as zeros.
        if stability == DataStability::Unstable {
            slice.unstable.insert(group);
        }
        self.dirty.insert(offset);
        &mut slice.bytes
    }

    /// Whether a writeback should run before more slices become dirty.
    pub(crate) fn is_over_dirty_limit(&self) -> bool {
        self.dirty.len() * 2 > self.capacity
    }

    /// Whether at most `limit` slices are dirty and all data that they refer to is stable.
    pub(crate) fn has_few_dirty(&self, limit: usize) -> bool {
        self.dirty.len() <= limit
            && self.dirty.iter().all(|offset| self.slots[self.index[offset]].1.unstable.is_empty())
    }

    pub(crate) fn has_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Starts to fetch a slice that a step did not find in the cache.
    pub(crate) fn fetch(&mut self, offset: u64) -> Fetch {
        if self.index.contains_key(&offset) {
            return Fetch::Present;
        }
        if let Some(event) = self.loading.get(&offset) {
            return Fetch::Wait(event.listen());
        }
        let event = Arc::new(Event::new());
        self.loading.insert(offset, Arc::clone(&event));
        Fetch::Read(event)
    }

    /// Caches the bytes that were read for `fetch`, unless the slice was invalidated meanwhile.
    pub(crate) fn loaded(&mut self, id: SliceId, ticket: &Arc<Event>, bytes: Box<[u8]>) {
        if self.is_loading(id.offset, ticket) {
            let slot = self.insert(id, bytes);
            self.slots[slot].1.is_new = true;
        }
    }

    /// Ends a fetch, whether it succeeded or not.
    pub(crate) fn fetch_ended(&mut self, offset: u64, ticket: &Arc<Event>) {
        if self.is_loading(offset, ticket) {
            self.loading.remove(&offset);
        }
        ticket.notify(usize::MAX);
    }

    fn is_loading(&self, offset: u64, ticket: &Arc<Event>) -> bool {
        self.loading.get(&offset).is_some_and(|event| Arc::ptr_eq(event, ticket))
    }

    /// Drops the slices in `[start, end)` that are cached or being read, because the range has a
    /// new use.
    pub(crate) fn invalidate(&mut self, start: u64, end: u64, step: u64) {
        for offset in (start..end).step_by(step as usize) {
            if let Some(event) = self.loading.remove(&offset) {
                event.notify(usize::MAX);
            }
            self.dirty.remove(&offset);
            if let Some(slot) = self.index.remove(&offset) {
                self.slots.swap_remove(slot);
                if let Some((moved, _)) = self.slots.get(slot) {
                    self.index.insert(*moved, slot);
                }
            }
        }
    }

    /// Caches a slice. If the cache is full, the slice replaces a clean slice if possible.
    pub(crate) fn insert(&mut self, id: SliceId, bytes: Box<[u8]>) -> usize {
        let slice = Slice {
            kind: id.kind,
            bytes,
            dirty: Entries::default(),
            writeback: Entries::default(),
            unstable: Entries::default(),
            used: true,
            is_new: false,
            step: self.step,
        };
        let slot = match self.victim() {
            Some(slot) => {
                self.index.remove(&self.slots[slot].0);
                self.slots[slot] = (id.offset, slice);
                slot
            }
            None => {
                self.slots.push((id.offset, slice));
                self.slots.len() - 1
            }
        };
        self.index.insert(id.offset, slot);
        slot
    }

    /// A clean slice that was not used since the hand passed; `None` if the cache is below its
    /// capacity, or if all slices are dirty or used by the current step. In the latter case the
    /// cache grows; `is_over_dirty_limit` bounds the growth.
    fn victim(&mut self) -> Option<usize> {
        if self.slots.len() < self.capacity {
            return None;
        }
        for _ in 0..self.slots.len() * 2 {
            self.hand = (self.hand + 1) % self.slots.len();
            let slice = &mut self.slots[self.hand].1;
            if slice.is_clean() && slice.step != self.step && !std::mem::take(&mut slice.used) {
                return Some(self.hand);
            }
        }
        None
    }

    /// Copies all dirty slices of a kind for a writeback.
    pub(crate) fn begin_writeback(&mut self, kind: SliceKind) -> Vec<SliceCopy> {
        let mut copies = Vec::new();
        let (slots, index) = (&mut self.slots, &self.index);
        self.dirty.retain(|&offset| {
            let slice = &mut slots[index[&offset]].1;
            if slice.kind != kind {
                return true;
            }
            slice.writeback = std::mem::take(&mut slice.dirty);
            copies.push(SliceCopy {
                id: SliceId { offset, kind },
                bytes: slice.bytes.clone(),
                stability: if slice.unstable.is_empty() {
                    DataStability::Stable
                } else {
                    DataStability::Unstable
                },
            });
            false
        });
        copies
    }

    /// Records that the writeback of this slice is durable.
    pub(crate) fn end_writeback(&mut self, id: SliceId) {
        let Some(slice) = self.slot(id.offset) else { return };
        slice.writeback = Entries::default();
        if slice.dirty.is_empty() {
            slice.unstable = Entries::default();
        }
    }

    /// Makes this slice dirty again, because its writeback failed.
    pub(crate) fn redirty(&mut self, id: SliceId) {
        let Some(slice) = self.slot(id.offset) else { return };
        let writeback = std::mem::take(&mut slice.writeback);
        if !writeback.is_empty() {
            slice.dirty.merge(writeback);
            self.dirty.insert(id.offset);
        }
    }

    fn slot(&mut self, offset: u64) -> Option<&mut Slice> {
        let slot = *self.index.get(&offset)?;
        Some(&mut self.slots[slot].1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STABLE: DataStability = DataStability::Stable;

    fn id(offset: u64) -> SliceId {
        SliceId { offset, kind: SliceKind::L2 }
    }

    fn filled(cache: &mut SliceCache, offset: u64) {
        cache.insert(id(offset), vec![0; 512].into());
    }

    #[test]
    fn clean_slices_are_replaced_and_dirty_ones_stay() {
        let mut cache = SliceCache::new(4);
        filled(&mut cache, 0);
        cache.change(0, 3, STABLE)[0] = 1;
        for offset in 1..100 {
            cache.begin_step();
            filled(&mut cache, offset * 512);
        }
        assert_eq!(cache.slots.len(), 4);
        assert!(cache.get(0).is_some_and(|slice| slice.is_dirty(3) && !slice.is_dirty(2)));
    }

    #[test]
    fn a_slice_is_dirty_until_the_writeback_that_copied_it_ends() {
        let mut cache = SliceCache::new(4);
        filled(&mut cache, 0);
        cache.change(0, 1, STABLE);
        assert_eq!(cache.begin_writeback(SliceKind::L2).len(), 1);
        cache.change(0, 2, STABLE);
        cache.end_writeback(id(0));
        let slice = cache.get(0).unwrap();
        assert!(!slice.is_dirty(1) && slice.is_dirty(2));
        assert_eq!(cache.begin_writeback(SliceKind::L2).len(), 1);
        cache.redirty(id(0));
        assert!(cache.get(0).unwrap().is_dirty(2) && cache.has_dirty());
    }

    #[test]
    fn entries_of_a_large_slice_are_noted_in_groups() {
        let mut cache = SliceCache::new(4);
        cache.insert(id(0), vec![0; 65536].into());
        cache.change(0, 8191, STABLE);
        let slice = cache.get(0).unwrap();
        assert!(slice.is_dirty(8191) && !slice.is_dirty(0) && !slice.is_dirty(8175));
    }

    #[test]
    fn a_slice_that_was_invalidated_while_it_was_read_is_not_cached() {
        let mut cache = SliceCache::new(4);
        let Fetch::Read(ticket) = cache.fetch(512) else { panic!("nobody reads it yet") };
        assert!(matches!(cache.fetch(512), Fetch::Wait(_)));
        cache.invalidate(0, 1024, 512);
        cache.loaded(id(512), &ticket, vec![1; 512].into());
        assert!(cache.get(512).is_none());
        cache.fetch_ended(512, &ticket);
        assert!(matches!(cache.fetch(512), Fetch::Read(_)));
    }
}
