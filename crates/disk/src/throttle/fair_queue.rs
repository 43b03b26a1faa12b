//! The choice of the next request: start-time fair queuing.
//!
//! Each waiting key (a disk, or a party of a disk) has a *position*: the time that its requests
//! have taken of the limits. The key with the lowest position is next; then its position advances
//! by the share that its request takes. So keys that always wait get equal shares, independent of
//! the cost and the number of their requests. A key that returns after a rest starts at the
//! position of the others, without saved credit. A key that returns soon, as a client with one
//! request at a time does, keeps its former position.
//!
//! A key has separate positions for reads and for writes, because each direction may have limits of
//! its own, which must not delay the other direction. The time that a key takes of the limits of
//! all requests counts in both positions: its reads may delay its writes, but by [`MAX_LEAD`] turns
//! of usual writes and one `span` at most, and vice versa. If both a read and a write may be
//! admitted, the lower position is next while the two positions differ by one span at most. If they
//! differ by more, reads and writes take turns. The two directions of one key take turns at equal
//! positions, too.
//!
//! Each key that waits with an admissible request is next after finitely many turns of others,
//! because every turn advances a position by at least one, and turns of the key's other direction
//! advance its position by a few turns at most.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;

use super::buckets::{Direction, Share};

/// If more keys are remembered than this number plus two for each waiting key, keys without waiting
/// requests are forgotten, except keys whose position is ahead.
const MAX_IDLE: usize = 64;
/// Minimum span, in nanoseconds. The span grows to twice the largest share, until no request waits.
const MIN_SPAN: u64 = 100_000_000;

/// The number of turns with usual shares by which the requests of one direction delay those of the
/// other one at most. Reason: a span can be a hundred thousand turns of the smallest writes.
const MAX_LEAD: u64 = 4;
/// The weight of a turn in the usual share of its direction.
const WEIGHT: u64 = 8;

/// See the module's page.
#[derive(Debug)]
pub(super) struct FairQueue<K> {
    entries: HashMap<K, Entry>,
    /// By direction: the keys with waiting requests of that direction, in the order of their
    /// positions.
    waiting: [BTreeSet<(u64, K)>; 2],
    /// By direction: the lowest position of a key that begins to wait.
    virtual_time: [u64; 2],
    /// By direction: the mean of the shares that the last turns took.
    usual_share: [u64; 2],
    span: u64,
    last_direction: Direction,
}

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// The share that requests of both directions took of the limits of all requests.
    taken_of_all: u64,
    /// By direction: the position after the last request.
    taken: [u64; 2],
    /// By direction: the position while requests wait.
    position: [u64; 2],
    /// By direction: the number of waiting requests.
    requests: [usize; 2],
    last_direction: Direction,
}

impl Entry {
    fn is_idle(&self) -> bool {
        self.requests == [0, 0]
    }

    fn place(&mut self, index: usize, max_lead: u64) {
        let least = self.taken[index];
        self.position[index] = self.taken_of_all.clamp(least, least.saturating_add(max_lead));
    }
}

impl<K: Copy + Eq + Hash + Ord> FairQueue<K> {
    pub(super) fn new() -> Self {
        Self {
            entries: HashMap::new(),
            waiting: Default::default(),
            virtual_time: [0; 2],
            usual_share: [0; 2],
            span: MIN_SPAN,
            last_direction: Direction::Read,
        }
    }

    /// By how much the requests of the other direction delay those of this one at most.
    fn max_lead(&self, index: usize) -> u64 {
        self.usual_share[index].saturating_mul(MAX_LEAD).min(self.span)
    }

    /// Whether a request of this direction waits.
    pub(super) fn has(&self, direction: Direction) -> bool {
        !self.waiting[direction as usize].is_empty()
    }

    /// Adds a waiting request of the key.
    pub(super) fn enter(&mut self, key: K, direction: Direction) {
        let index = direction as usize;
        if self.waiting[index].is_empty() {
            // Requests of the other direction may have advanced their virtual time meanwhile.
            self.virtual_time[index] = self.virtual_time[0].max(self.virtual_time[1]);
        }
        let (max_lead, virtual_time) = (self.max_lead(index), self.virtual_time[index]);
        let entry = self.entries.entry(key).or_default();
        let is_new = entry.is_idle();
        entry.requests[index] += 1;
        if entry.requests[index] > 1 {
            return;
        }
        entry.taken[index] = entry.taken[index].max(virtual_time);
        if is_new {
            entry.taken_of_all = entry.taken_of_all.max(virtual_time);
        }
        entry.place(index, max_lead);
        self.waiting[index].insert((entry.position[index], key));
    }

    /// Removes a waiting request of the key.
    pub(super) fn leave(&mut self, key: K, direction: Direction) {
        let index = direction as usize;
        let Some(entry) = self.entries.get_mut(&key) else { return };
        entry.requests[index] -= 1;
        if entry.requests[index] == 0 {
            self.waiting[index].remove(&(entry.position[index], key));
        }
        self.forget_idle();
    }

    /// The next key to be admitted, with a request of one of these directions.
    pub(super) fn first(&self, directions: &[Direction]) -> Option<(K, Direction)> {
        let first = |direction: Direction| {
            let &(position, key) = self.waiting[direction as usize].first()?;
            directions.contains(&direction).then_some((position, key, direction))
        };
        let next = match Direction::BOTH.map(first) {
            [Some(read), Some(write)] if (read.0, read.1) == (write.0, write.1) => {
                let last = self.entries.get(&read.1).map_or(read.2, |entry| entry.last_direction);
                if read.2 == last { write } else { read }
            }
            [Some(read), Some(write)] if read.0.abs_diff(write.0) > self.span => {
                let last = self.last_direction;
                if read.2 == last { write } else { read }
            }
            [read, write] => read.into_iter().chain(write).min_by_key(|next| next.0)?,
        };
        Some((next.1, next.2))
    }

    /// Advances a waiting key, whose request of this direction has had its turn and took `share`.
    pub(super) fn advance(&mut self, key: K, direction: Direction, share: Share) {
        let index = direction as usize;
        self.span = self.span.max(share.of_direction.saturating_mul(2));
        self.last_direction = direction;
        let usual = self.usual_share[index].max(1);
        self.usual_share[index] = usual - usual / WEIGHT + share.of_direction.div_ceil(WEIGHT);
        let max_leads = [self.max_lead(0), self.max_lead(1)];
        let Some(entry) = self.entries.get_mut(&key) else { return };
        entry.last_direction = direction;
        let former = *entry;
        self.virtual_time[index] = self.virtual_time[index].max(former.position[index]);
        entry.taken_of_all = former.taken_of_all.saturating_add(share.of_all);
        entry.taken[index] = former.position[index].saturating_add(share.of_direction);
        for (index, waiting) in self.waiting.iter_mut().enumerate() {
            if former.requests[index] > 0 {
                entry.place(index, max_leads[index]);
                waiting.remove(&(former.position[index], key));
                waiting.insert((entry.position[index], key));
            }
        }
    }

    /// Forgets a key that waits no longer.
    pub(super) fn remove(&mut self, key: K) {
        self.entries.remove(&key);
    }

    /// Bounds the memory for keys without waiting requests.
    fn forget_idle(&mut self) {
        let waiting: usize = self.waiting.iter().map(BTreeSet::len).sum();
        if waiting == 0 {
            // All keys start at the same position again.
            for (_, entry) in self.entries.drain() {
                for (time, taken) in self.virtual_time.iter_mut().zip(entry.taken) {
                    *time = (*time).max(taken);
                }
            }
            self.span = MIN_SPAN;
        } else if self.entries.len() > MAX_IDLE + 2 * waiting {
            let now = self.virtual_time;
            let is_ahead = |entry: &Entry| entry.taken[0] > now[0] || entry.taken[1] > now[1];
            self.entries.retain(|_, entry| !entry.is_idle() || is_ahead(entry));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: &[Direction] = &Direction::BOTH;

    /// A share of the limits of all requests.
    fn of_all(share: u64) -> Share {
        Share { of_all: share, of_direction: share }
    }

    /// Gives the first key a turn.
    fn turn(queue: &mut FairQueue<usize>, directions: &[Direction], share: Share) -> Option<usize> {
        let (key, direction) = queue.first(directions)?;
        queue.advance(key, direction, share);
        queue.leave(key, direction);
        Some(key)
    }

    #[test]
    fn shares_are_equal_whatever_the_requests_cost() {
        let mut queue = FairQueue::new();
        let mut taken = [0u64; 3];
        let share = [1, 10, 7];
        for key in 0..3 {
            (0..10_000).for_each(|_| queue.enter(key, Direction::Read));
        }
        for _ in 0..3000 {
            let (key, _) = queue.first(BOTH).unwrap();
            queue.advance(key, Direction::Read, of_all(share[key]));
            queue.leave(key, Direction::Read);
            taken[key] += share[key];
        }
        let (least, most) = (taken.iter().min().unwrap(), taken.iter().max().unwrap());
        assert!(most - least <= 10, "{taken:?}");
    }

    #[test]
    fn a_key_with_one_request_at_a_time_has_its_turn_beside_one_with_many() {
        let mut queue = FairQueue::new();
        (0..1000).for_each(|_| queue.enter(0, Direction::Write));
        let mut turns = 0;
        for _ in 0..100 {
            queue.enter(1, Direction::Read);
            for _ in 0..2 {
                turns += turn(&mut queue, BOTH, of_all(5)).unwrap();
            }
        }
        assert_eq!(turns, 100);
    }

    #[test]
    fn a_rest_saves_nothing() {
        let mut queue = FairQueue::new();
        (0..100).for_each(|_| queue.enter(1, Direction::Read));
        for _ in 0..50 {
            turn(&mut queue, BOTH, of_all(1));
        }
        (0..100).for_each(|_| queue.enter(2, Direction::Read));
        let turns = std::iter::from_fn(|| turn(&mut queue, BOTH, of_all(1)));
        let turns: Vec<_> = turns.take(40).collect();
        assert!((19..=21).contains(&turns.iter().filter(|key| **key == 2).count()), "{turns:?}");
    }

    #[test]
    fn keys_that_come_and_go_are_forgotten() {
        let mut queue = FairQueue::new();
        (0..100_000).for_each(|_| queue.enter(0, Direction::Read));
        for key in 1..5000 {
            queue.enter(key, Direction::Read);
            for _ in 0..2 {
                turn(&mut queue, BOTH, of_all(1));
            }
            assert!(queue.entries.len() < 200, "{}", queue.entries.len());
        }
    }

    #[test]
    fn what_reads_take_of_their_own_limit_does_not_hold_writes_back() {
        let mut queue = FairQueue::new();
        (0..1000).for_each(|_| queue.enter(0, Direction::Write));
        (0..1000).for_each(|_| queue.enter(1, Direction::Write));
        (0..1000).for_each(|_| queue.enter(1, Direction::Read));
        let mut writes = [0, 0];
        let share = Share { of_all: 0, of_direction: 50 };
        for _ in 0..100 {
            assert_eq!(turn(&mut queue, &[Direction::Read], share), Some(1));
            writes[turn(&mut queue, &[Direction::Write], share).unwrap()] += 1;
        }
        assert_eq!(writes, [50, 50]);
    }

    #[test]
    fn what_reads_take_of_the_common_limit_holds_writes_back_for_a_span_at_most() {
        let mut queue = FairQueue::new();
        (0..100_000).for_each(|_| queue.enter(0, Direction::Write));
        (0..100_000).for_each(|_| queue.enter(1, Direction::Read));
        let share = of_all(MIN_SPAN / 20);
        // For a long time only reads may be admitted.
        (0..1000).for_each(|_| assert!(turn(&mut queue, &[Direction::Read], share).is_some()));
        (0..1000).for_each(|_| queue.enter(1, Direction::Write));
        let turns = (0..100).position(|_| turn(&mut queue, &[Direction::Write], share) == Some(1));
        assert!(turns.is_some_and(|turns| turns <= 21), "{turns:?}");
        // The writes of the other key do not wait for long either, although the reads are far
        // ahead.
        let writes = (0..100).filter(|_| turn(&mut queue, BOTH, share) == Some(0)).count();
        assert!(writes >= 30, "{writes}");
    }

    #[test]
    fn large_reads_delay_the_small_writes_of_their_key_for_a_few_turns() {
        let mut queue = FairQueue::new();
        let (read, write) = (of_all(MIN_SPAN / 20), of_all(1000));
        (0..1000).for_each(|_| queue.enter(1, Direction::Read));
        (0..100_000).for_each(|_| queue.enter(0, Direction::Write));
        queue.enter(1, Direction::Write);
        (0..100).for_each(|_| assert_eq!(turn(&mut queue, &[Direction::Read], read), Some(1)));
        let turns = (0..1000).position(|_| turn(&mut queue, &[Direction::Write], write) == Some(1));
        assert!(turns.is_some_and(|turns| turns <= 2 * MAX_LEAD as usize), "{turns:?}");
    }
}
