//! The claims of a disk, and the waits of claims for other claims.
//!
//! A claim counts the claims that it waits for, and is granted when the count is zero. Each claim
//! lists the claims that wait for it. In the common case, without exclusive claims on the disk, a
//! shared claim is only an entry in a table.

use std::collections::BTreeMap;
use std::task::{Context, Poll, Waker};

use blockhouse_core::ByteRange;
use slab::Slab;
use smallvec::SmallVec;

/// The ID of a claim while it exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClaimId {
    Shared(usize),
    Exclusive(usize),
}

/// See the module's page.
#[derive(Default)]
pub(super) struct Claims {
    shared: Slab<Entry>,
    exclusive: Slab<Entry>,
    /// The last exclusive claim of each range that has one, by the range's first byte. The ranges
    /// do not overlap. Some ranges may belong to claims that have ended.
    last: BTreeMap<u64, Segment>,
    /// The number of exclusive claims so far. The number of a claim distinguishes it from a later
    /// claim with the same slab key.
    count: u64,
    #[cfg(test)]
    steps: u64,
}

struct Entry {
    range: ByteRange,
    /// The number of claims that this claim waits for.
    blockers: usize,
    /// The claims that wait for this claim.
    blocked: Vec<ClaimId>,
    waker: Option<Waker>,
    /// Whether the claim's future was dropped while the claim waited. Such a claim ends when it
    /// would be granted, because claims that wait for it must also wait for the claims before it.
    is_dropped: bool,
    /// The number of an exclusive claim: see [`Claims::count`].
    number: u64,
}

#[derive(Clone, Copy)]
struct Segment {
    end: u64,
    owner: usize,
    number: u64,
}

/// Wakers of claims that are granted.
pub(super) type Granted = SmallVec<[Waker; 4]>;

impl Claims {
    /// Adds a claim that conflicts only with exclusive claims.
    pub(super) fn add_shared(&mut self, range: ByteRange) -> ClaimId {
        let id = ClaimId::Shared(self.shared.insert(Entry::new(range, 0)));
        if !self.exclusive.is_empty() {
            for owner in self.owners(range) {
                self.block(id, ClaimId::Exclusive(owner));
            }
        }
        id
    }

    /// Adds a claim that conflicts with all other claims.
    pub(super) fn add_exclusive(&mut self, range: ByteRange) -> ClaimId {
        self.count += 1;
        let number = self.count;
        let key = self.exclusive.insert(Entry::new(range, number));
        let id = ClaimId::Exclusive(key);
        for owner in self.owners(range) {
            self.block(id, ClaimId::Exclusive(owner));
        }
        let sharers: Vec<usize> = self
            .shared
            .iter()
            .filter(|(_, entry)| entry.range.overlaps(range))
            .map(|(key, _)| key)
            .collect();
        self.step(self.shared.len());
        sharers.into_iter().for_each(|key| self.block(id, ClaimId::Shared(key)));
        self.cut(range);
        let segment = Segment { end: range.end(), owner: key, number };
        self.last.insert(range.offset(), segment);
        id
    }

    /// Whether the claim is granted; if not, the waker is called when it is.
    pub(super) fn poll(&mut self, id: ClaimId, context: &Context<'_>) -> Poll<()> {
        let entry = self.entry(id);
        if entry.blockers == 0 {
            return Poll::Ready(());
        }
        match &mut entry.waker {
            Some(waker) => waker.clone_from(context.waker()),
            none => *none = Some(context.waker().clone()),
        }
        Poll::Pending
    }

    /// Ends a claim, or marks it as dropped if it waits. Returns the wakers of claims that are
    /// granted now.
    pub(super) fn release(&mut self, id: ClaimId) -> Granted {
        let mut granted = Granted::new();
        let entry = self.entry(id);
        if entry.blockers > 0 {
            (entry.is_dropped, entry.waker) = (true, None);
            return granted;
        }
        let mut ended: SmallVec<[ClaimId; 4]> = smallvec::smallvec![id];
        while let Some(id) = ended.pop() {
            for next in self.remove(id) {
                let entry = self.entry(next);
                entry.blockers -= 1;
                if entry.blockers > 0 {
                    continue;
                }
                if entry.is_dropped { ended.push(next) } else { granted.extend(entry.waker.take()) }
            }
        }
        granted
    }

    fn entry(&mut self, id: ClaimId) -> &mut Entry {
        match id {
            ClaimId::Shared(key) => &mut self.shared[key],
            ClaimId::Exclusive(key) => &mut self.exclusive[key],
        }
    }

    /// Makes `id` wait for `blocker`.
    fn block(&mut self, id: ClaimId, blocker: ClaimId) {
        self.step(1);
        self.entry(blocker).blocked.push(id);
        self.entry(id).blockers += 1;
    }

    /// Removes an entry; returns the claims that waited for it.
    fn remove(&mut self, id: ClaimId) -> Vec<ClaimId> {
        let blocked = match id {
            ClaimId::Shared(key) => {
                let entry = self.shared.remove(key);
                if self.shared.is_empty() {
                    // Removes the vacant entries of the slab, because a new exclusive claim
                    // iterates over them, too.
                    self.shared.clear();
                }
                entry.blocked
            }
            ClaimId::Exclusive(key) => {
                let entry = self.exclusive.remove(key);
                self.forget(&entry);
                entry.blocked
            }
        };
        self.step(1 + blocked.len());
        blocked
    }

    /// Removes the segment of an ended exclusive claim. Later claims may have divided the claim's
    /// range into several segments. This function removes the first segment; the others are removed
    /// when many segments of ended claims are left. Existing claims have few segments: a claim has
    /// at most one more than the number of later claims in its range, and these claims wait for it.
    fn forget(&mut self, gone: &Entry) {
        let first = gone.range.offset();
        if self.last.get(&first).is_some_and(|segment| segment.number == gone.number) {
            self.last.remove(&first);
        }
        if self.last.len() > 4 * self.exclusive.len() + 16 {
            self.step(self.last.len());
            let exclusive = &self.exclusive;
            self.last.retain(|_, segment| segment.is_live(exclusive));
        }
    }

    /// The exclusive claims that are the last claims of a part of `range`, each once.
    fn owners(&mut self, range: ByteRange) -> SmallVec<[usize; 4]> {
        let mut owners: SmallVec<[usize; 4]> = SmallVec::new();
        for (_, segment) in self.last.range(self.first_start(range)..range.end()) {
            if segment.end > range.offset() && segment.is_live(&self.exclusive) {
                owners.push(segment.owner);
            }
        }
        owners.sort_unstable();
        owners.dedup();
        self.step(1 + owners.len());
        owners
    }

    /// The first byte of the segment that contains the first byte of `range`; if there is no such
    /// segment, the first byte of `range`.
    fn first_start(&self, range: ByteRange) -> u64 {
        let before = self.last.range(..=range.offset()).next_back();
        before
            .filter(|(_, segment)| segment.end > range.offset())
            .map_or(range.offset(), |(&start, _)| start)
    }

    /// Removes `range` from all segments. The parts of segments outside of `range` stay.
    fn cut(&mut self, range: ByteRange) {
        let mut start = self.first_start(range);
        while let Some((&at, &segment)) = self.last.range(start..range.end()).next() {
            self.step(1);
            self.last.remove(&at);
            if at < range.offset() {
                self.last.insert(at, Segment { end: range.offset(), ..segment });
            }
            if segment.end > range.end() {
                self.last.insert(range.end(), segment);
            }
            start = range.offset();
        }
    }

    fn step(&mut self, count: usize) {
        #[cfg(test)]
        {
            self.steps += count as u64;
        }
        let _ = count;
    }

    /// The number of entries that were examined so far.
    #[cfg(test)]
    pub(super) fn steps(&self) -> u64 {
        self.steps
    }
}

impl Entry {
    fn new(range: ByteRange, number: u64) -> Self {
        Self { range, blockers: 0, blocked: Vec::new(), waker: None, is_dropped: false, number }
    }
}

impl Segment {
    /// Whether the claim that owns the segment still exists.
    fn is_live(&self, exclusive: &Slab<Entry>) -> bool {
        exclusive.get(self.owner).is_some_and(|entry| entry.number == self.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the rule with random claims that are released in random order: a claim is granted
    /// when no earlier claim conflicts with it.
    #[test]
    fn claims_are_granted_exactly_when_no_earlier_one_conflicts() {
        for seed in 0..200 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut claims = Claims::default();
            let mut known: Vec<(ClaimId, ByteRange)> = Vec::new();
            for _ in 0..300 {
                if known.len() < 12 && random.bool() {
                    let start = random.u64(..16);
                    let range = ByteRange::between(start, start + random.u64(1..6));
                    let id = if random.bool() {
                        claims.add_shared(range)
                    } else {
                        claims.add_exclusive(range)
                    };
                    known.push((id, range));
                } else if !known.is_empty() {
                    let granted: Vec<usize> = (0..known.len())
                        .filter(|&at| is_granted(&mut claims, known[at].0))
                        .collect();
                    let at = granted[random.usize(..granted.len())];
                    let (id, _) = known.remove(at);
                    claims.release(id);
                }
                for (at, &(id, range)) in known.iter().enumerate() {
                    let is_free = known[..at].iter().all(|&(other, others)| {
                        let both_shared =
                            matches!((id, other), (ClaimId::Shared(_), ClaimId::Shared(_)));
                        both_shared || !range.overlaps(others)
                    });
                    assert_eq!(is_granted(&mut claims, id), is_free, "seed {seed}, {range}");
                }
            }
            for (id, _) in known {
                assert!(is_granted(&mut claims, id), "those before it are gone");
                claims.release(id);
            }
            assert!(claims.shared.is_empty() && claims.exclusive.is_empty());
            assert!(claims.last.len() <= 16, "what belongs to no claim is bounded");
        }
    }

    fn is_granted(claims: &mut Claims, id: ClaimId) -> bool {
        claims.poll(id, &Context::from_waker(Waker::noop())).is_ready()
    }
}
