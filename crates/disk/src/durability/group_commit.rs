//! The choice of how concurrent durable writes become durable, by measurement: FUA for each write,
//! or plain writes and one flush for all (group commit). Which one is faster depends on the disk,
//! its driver and the file system, and on how many writes are in flight.
//!
//! The writes are divided into *windows*. All writes of a window use one way, and the time of the
//! window is the time for each write that ends in it. For each range of the number of writes in
//! flight, a [`Trial`] compares the windows of both ways. The first writes to end after a change of
//! the way are not counted, because most of them have begun before it.
//!
//! Guarantees: lone writes always use FUA, which is one operation instead of two. The other way is
//! tried for the first time after 4 windows, and if it keeps losing, in each 65th window. It is
//! tried at once if the time of the windows has changed by a half. So a way that takes twice the
//! time costs less than 2 % in the long run. A write costs two atomic operations.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering};

use blockhouse_core::GroupCommit;
use blockhouse_core::metrics::{Timestamp, clock};
use blockhouse_core::trial::{Terms, Trial, Way, closer};
use parking_lot::Mutex;

/// A flush is a second operation, but a gain of a thirty-second is one. One slow window of the
/// winner does not decide; few windows of the loser do, because they are rare.
const TERMS: Terms = Terms {
    first: Way::Cheap,
    min_gain: 32,
    weight: 8,
    loser_weight: 2,
    burst: 1,
    min_backoff: 4,
    max_backoff: 64,
};
static FUA_FIRST: Terms = TERMS;
static SHARED_FIRST: Terms = Terms { first: Way::Costly, ..TERMS };

/// How many ranges of the number of writes in flight there are, of which each is twice as large as
/// the one before.
const CLASSES: usize = 7;

/// A window counts this many writes for each write in flight. Writes that share a flush end
/// together, so fewer would be few flushes.
const WRITES_FOR_EACH: u32 = 16;

/// The number of writes for each write in flight that end uncounted after a change of the way.
const SETTLING_FOR_EACH: u32 = 2;

/// A window in which the clients paused counts as this many times the mean at most.
const MAX_PAUSE: u64 = 2;

/// Minimum time for each write, in nanoseconds. Less is an error: the clocks of two loops may
/// differ by the length of an iteration.
const MIN_TIME: u64 = 1000;

/// The weight of a window in the mean that shows whether conditions have changed.
const CHANGE_WEIGHT: u64 = 8;

/// The choice for the concurrent durable writes of one storage.
pub(super) struct GroupCommitTrial {
    shares_flush: AtomicBool,
    /// The number of writes that have to end until the windows are looked at.
    left: AtomicI64,
    /// The most writes in flight since the windows were looked at.
    most: AtomicU32,
    windows: Mutex<Windows>,
}

struct Windows {
    classes: [Class; CLASSES],
    /// The class of the present window.
    class: usize,
    way: Way,
    /// The beginning of the present window, and the number of writes that it counts. `None` while
    /// the writes of the window before it end.
    counted: Option<(Timestamp, u32)>,
}

/// The windows in which the number of writes in flight was in one range.
#[derive(Clone)]
struct Class {
    trial: Trial,
    /// The time for each write of the winner's windows of late, in nanoseconds.
    recent: Option<u64>,
    /// The same when conditions last changed.
    reference: Option<u64>,
}

/// The next writes.
#[derive(Clone, Copy)]
struct Next {
    way: Way,
    /// The number of writes that have to end until the windows are looked at again.
    left: u32,
    /// Whether the winner has changed.
    is_new: bool,
}

impl GroupCommitTrial {
    /// A choice of which nothing is measured yet, as the storage starts.
    pub(super) fn new(storage: GroupCommit) -> Self {
        let shares_first = storage == GroupCommit::Measured { shares_first: true };
        let terms = if shares_first { &SHARED_FIRST } else { &FUA_FIRST };
        let class = Class { trial: Trial::new(terms), recent: None, reference: None };
        Self {
            shares_flush: AtomicBool::new(shares_first),
            left: AtomicI64::new(0),
            most: AtomicU32::new(0),
            windows: Mutex::new(Windows {
                classes: std::array::from_fn(|_| class.clone()),
                class: 0,
                way: terms.first,
                counted: None,
            }),
        }
    }

    /// Begins a durable write that is not alone: `in_flight` writes are in flight with it. Returns
    /// whether the write is plain and shares a flush with others.
    pub(super) fn begin(&self, in_flight: usize) -> bool {
        let in_flight = u32::try_from(in_flight).unwrap_or(u32::MAX);
        if in_flight > self.most.load(Ordering::Relaxed) {
            self.most.fetch_max(in_flight, Ordering::Relaxed);
        }
        self.shares_flush.load(Ordering::Relaxed)
    }

    /// Ends a write to the storage `name`.
    pub(super) fn end(&self, name: &str) {
        if self.left.fetch_sub(1, Ordering::Relaxed) > 1 {
            return;
        }
        // Another thread that looks at the windows now counts this write, too.
        let Some(mut windows) = self.windows.try_lock() else { return };
        let most = self.most.swap(0, Ordering::Relaxed).clamp(2, u32::from(u16::MAX));
        let next = windows.next(clock::now(), most);
        self.left.store(next.left.into(), Ordering::Relaxed);
        self.shares_flush.store(next.way == Way::Costly, Ordering::Relaxed);
        drop(windows);
        if next.is_new {
            let way = match next.way {
                Way::Cheap => "FUA for each",
                Way::Costly => "one flush for all",
            };
            tracing::debug!("{name}: {way} is faster, with {most} durable writes in flight");
        }
    }
}

impl Windows {
    /// Ends the present window, if its writes were counted, and chooses the way of the next one.
    /// `most` is the largest number of writes in flight.
    fn next(&mut self, now: Timestamp, most: u32) -> Next {
        let length = most * WRITES_FOR_EACH;
        let Some((began, counted)) = self.counted.replace((now, length)) else {
            return Next { way: self.way, left: length, is_new: false };
        };
        let time = now.nanoseconds_since(began) / u64::from(counted);
        self.classes[self.class].record(self.way, time);
        self.class = class_of(most);
        let trial = &mut self.classes[self.class].trial;
        let known = trial.winner();
        let way = trial.choose();
        let is_new = trial.winner() != known;
        if std::mem::replace(&mut self.way, way) == way {
            return Next { way, left: length, is_new };
        }
        self.counted = None;
        Next { way, left: most * SETTLING_FOR_EACH, is_new }
    }
}

impl Class {
    /// Records the time for each write of a window. If the windows of the winner have come to take
    /// a half more or less, the other way is tried at once.
    fn record(&mut self, way: Way, time: u64) {
        let most = self.recent.map_or(u64::MAX, |recent| recent.saturating_mul(MAX_PAUSE));
        let time = time.clamp(MIN_TIME, most.max(MIN_TIME));
        self.trial.record(way, time);
        if way != self.trial.winner() {
            return;
        }
        let recent = self.recent.map_or(time, |recent| closer(recent, time, CHANGE_WEIGHT));
        self.recent = Some(recent);
        let reference = *self.reference.get_or_insert(recent);
        if recent.max(reference) * 2 > recent.min(reference) * 3 {
            self.reference = self.recent;
            self.trial.retry();
        }
    }
}

/// The range of a number in flight: up to 2, 5, 11, 23, 47, 95, and more. Powers of two are inside
/// of the ranges, because clients often keep as many requests in flight, or a little less.
fn class_of(in_flight: u32) -> usize {
    let class = (in_flight / 3).checked_ilog2().map_or(0, |doubled| doubled as usize + 1);
    class.min(CLASSES - 1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Makes writes, 16 of them in flight, for `windows` windows. A write takes the nanoseconds
    /// that `time` tells for its way. Returns the number of windows that shared flushes.
    fn shared_windows(
        trial: &mut Windows,
        now: &mut Timestamp,
        windows: u32,
        time: impl Fn(Way) -> u64,
    ) -> u32 {
        let (mut shared, mut left) = (0, windows);
        while left > 0 {
            let next = trial.next(*now, 16);
            *now = *now + Duration::from_nanos(u64::from(next.left) * time(next.way));
            if next.left == 16 * WRITES_FOR_EACH {
                left -= 1;
                shared += u32::from(next.way == Way::Costly);
            }
        }
        shared
    }

    #[test]
    fn the_faster_way_is_used_and_the_other_one_costs_little() {
        let trial = GroupCommitTrial::new(GroupCommit::Measured { shares_first: false });
        let (windows, now) = (&mut *trial.windows.lock(), &mut clock::now());
        let slow_flushes = |way| if way == Way::Costly { 200_000 } else { 100_000 };
        let fast_flushes = |way| if way == Way::Costly { 60_000 } else { 100_000 };
        assert!(shared_windows(windows, now, 6_500, slow_flushes) < 110);
        assert!(shared_windows(windows, now, 400, fast_flushes) > 200, "found by two trials");
        assert!(shared_windows(windows, now, 6_500, fast_flushes) > 6_350);
        assert!(shared_windows(windows, now, 20, slow_flushes) < 20, "a change is seen at once");
        assert!(shared_windows(windows, now, 6_500, slow_flushes) < 110);
    }

    #[test]
    fn the_first_writes_to_end_after_a_change_of_the_way_are_not_counted() {
        let trial = GroupCommitTrial::new(GroupCommit::Measured { shares_first: false });
        let mut ended = 0;
        while !trial.begin(16) {
            trial.end("disk");
            ended += 1;
        }
        assert_eq!(ended, 1 + 16 * WRITES_FOR_EACH as usize * 5);
        assert!(trial.windows.lock().counted.is_none());
        for _ in 1..16 * SETTLING_FOR_EACH {
            trial.end("disk");
        }
        assert!(trial.windows.lock().counted.is_none());
        trial.end("disk");
        assert!(trial.windows.lock().counted.is_some());
    }

    #[test]
    fn a_fixed_number_of_clients_stays_in_one_range() {
        for clients in [2_u32, 4, 8, 16, 32, 64] {
            assert_eq!(class_of(clients), class_of(clients - clients / 4));
        }
        assert_eq!(class_of(u32::MAX), CLASSES - 1);
    }
}
