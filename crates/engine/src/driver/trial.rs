//! A trial of two ways to do the same work: the way that takes less time is used, and the other one
//! is tried again now and then, because conditions change.
//!
//! Guarantees: the cost of the trial is bounded if each use is recorded. The losing way is used
//! `burst` times in a row after [`MIN_BACKOFF`] uses of the winner at first, and after
//! [`MAX_BACKOFF`] uses if it keeps losing.

/// A way's time is the mean of this many uses at first. Later each use moves the mean by one part
/// in this many of the difference, because single times differ by more than the two ways do.
const WEIGHT: u64 = 8;

/// The costly way wins if it makes the time shorter by at least one part in this many.
const MIN_GAIN: u64 = 8;

/// The number of uses of the winner before the losing way is tried again, at first.
const MIN_BACKOFF: u16 = 16;
/// The number of uses of the winner before the losing way is tried again, after it has lost often.
const MAX_BACKOFF: u16 = 1024;

/// The two ways of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Cheap,
    /// The way with a cost of its own besides its time, so it must be shorter by a margin.
    Costly,
}

/// The times of both ways, and the way that has won so far.
#[derive(Clone, Debug)]
pub(crate) struct Trial {
    cheap: Mean,
    costly: Mean,
    /// The way that is used until both times are known.
    first: Way,
    winner: Way,
    /// The number of uses of the losing way in a row.
    burst: u16,
    /// The number of uses left of the winner and then of the loser, before the backoff doubles.
    left: u16,
    /// The number of uses of the winner between two bursts of the loser.
    backoff: u16,
}

/// A decaying mean of times.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    nanoseconds: u64,
    /// The number of times seen, up to [`WEIGHT`].
    count: u64,
}

impl Trial {
    /// A trial that begins with the way `first` and uses the losing way `burst` times in a row.
    /// With several uses in a row, one long time does not decide.
    pub(crate) fn new(first: Way, burst: u16) -> Self {
        let (cheap, costly) = (Mean::default(), Mean::default());
        let (left, backoff) = (MIN_BACKOFF + burst, MIN_BACKOFF);
        Self { cheap, costly, first, winner: first, burst, left, backoff }
    }

    /// The way for the next use: the winner, or the loser in a burst.
    pub(crate) fn choose(&mut self) -> Way {
        let winner = match (self.cheap.known(), self.costly.known()) {
            (Some(cheap), Some(costly)) if costly < cheap - cheap / MIN_GAIN => Way::Costly,
            (Some(_), Some(_)) => Way::Cheap,
            _ => self.first,
        };
        if std::mem::replace(&mut self.winner, winner) != winner {
            (self.left, self.backoff) = (MIN_BACKOFF + self.burst, MIN_BACKOFF);
        }
        if self.left == 0 {
            self.backoff = (self.backoff * 2).min(MAX_BACKOFF);
            self.left = self.backoff + self.burst;
        }
        self.left -= 1;
        match winner {
            _ if self.left >= self.burst => winner,
            Way::Cheap => Way::Costly,
            Way::Costly => Way::Cheap,
        }
    }

    /// A use of this way took this many nanoseconds.
    pub(crate) fn record(&mut self, way: Way, nanoseconds: u64) {
        match way {
            Way::Cheap => self.cheap.add(nanoseconds),
            Way::Costly => self.costly.add(nanoseconds),
        }
    }
}

impl Mean {
    /// The mean; `None` before the first time.
    fn known(self) -> Option<u64> {
        (self.count > 0).then_some(self.nanoseconds)
    }

    fn add(&mut self, nanoseconds: u64) {
        self.count = (self.count + 1).min(WEIGHT);
        self.nanoseconds = closer(self.nanoseconds, nanoseconds, self.count);
    }
}

/// `known`, moved one part in `weight` of the way to `seen`.
pub(crate) fn closer(known: u64, seen: u64, weight: u64) -> u64 {
    (known * (weight - 1) + seen) / weight
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of uses of the costly way in `uses` uses, if the two ways take these times.
    fn costly_uses(trial: &mut Trial, uses: u32, cheap: u64, costly: u64) -> u32 {
        let mut count = 0;
        for _ in 0..uses {
            let way = trial.choose();
            count += u32::from(way == Way::Costly);
            trial.record(way, if way == Way::Costly { costly } else { cheap });
        }
        count
    }

    #[test]
    fn the_shorter_way_is_used_and_the_other_one_is_tried_ever_more_rarely() {
        let mut trial = Trial::new(Way::Cheap, 4);
        assert!((40..100).contains(&costly_uses(&mut trial, 10_000, 100, 400)));
        assert!(costly_uses(&mut trial, 10_000, 400, 100) > 9_000, "the machine is busy now");
        assert!(costly_uses(&mut trial, 10_000, 100, 400) < 100, "and idle again");
    }

    #[test]
    fn one_long_time_does_not_decide() {
        let mut trial = Trial::new(Way::Cheap, 4);
        assert_eq!(costly_uses(&mut trial, u32::from(MIN_BACKOFF), 300, 100), 0);
        assert_eq!(costly_uses(&mut trial, 1, 300, 600), 1, "the first of a burst");
        assert!(costly_uses(&mut trial, 100, 300, 100) > 80);
    }

    #[test]
    fn a_gain_within_the_margin_does_not_count() {
        let mut trial = Trial::new(Way::Cheap, 4);
        assert!(costly_uses(&mut trial, 10_000, 100, 90) < 100);
        assert!(costly_uses(&mut trial, 10_000, 100, 80) > 9_000);
    }
}
