//! A trial of two ways to do the same work: the way that takes less time is used, and the other one
//! is tried again now and then, because conditions change.
//!
//! Guarantees: the cost of the trial is bounded if each use is recorded. The losing way is used
//! [`burst`](Terms::burst) times in a row after [`min_backoff`](Terms::min_backoff) uses of the
//! winner at first, and after [`max_backoff`](Terms::max_backoff) uses if it keeps losing. No
//! memory is allocated.

/// The two ways of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The way with no cost besides its time.
    Cheap,
    /// The way with a cost of its own besides its time, so it must be shorter by a margin.
    Costly,
}

/// The terms of a trial.
#[derive(Debug)]
pub struct Terms {
    /// The way that is used until both times are known.
    pub first: Way,
    /// The costly way wins if it makes the time shorter by at least one part in this many.
    pub min_gain: u64,
    /// A way's time is the mean of this many uses at first. Later each use moves the mean by one
    /// part in this many of the difference, because single times differ by more than the ways do.
    pub weight: u64,
    /// The same for the losing way, which is used rarely.
    pub loser_weight: u64,
    /// The number of uses of the losing way in a row. With several, one long time does not decide.
    pub burst: u16,
    /// The number of uses of the winner before the losing way is tried again, at first.
    pub min_backoff: u16,
    /// The same after the losing way has lost often.
    pub max_backoff: u16,
}

/// The times of both ways, and the way that has won so far.
#[derive(Clone, Debug)]
pub struct Trial {
    terms: &'static Terms,
    cheap: Mean,
    costly: Mean,
    winner: Way,
    /// The number of uses left of the winner and then of the loser, before the backoff doubles.
    left: u16,
    /// The number of uses of the winner between two bursts of the loser.
    backoff: u16,
}

/// A decaying mean of times.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    nanoseconds: u64,
    /// The number of times seen, up to [`Terms::weight`].
    count: u64,
}

impl Trial {
    /// A trial of which no use has been recorded.
    pub fn new(terms: &'static Terms) -> Self {
        let (cheap, costly) = (Mean::default(), Mean::default());
        let (left, backoff) = (terms.min_backoff + terms.burst, terms.min_backoff);
        Self { terms, cheap, costly, winner: terms.first, left, backoff }
    }

    /// The way for the next use: the winner, or the loser in a burst.
    pub fn choose(&mut self) -> Way {
        let Terms { first, min_gain, burst, min_backoff, max_backoff, .. } = *self.terms;
        let winner = match (self.cheap.known(), self.costly.known()) {
            (Some(cheap), Some(costly)) if costly < cheap - cheap / min_gain => Way::Costly,
            (Some(_), Some(_)) => Way::Cheap,
            _ => first,
        };
        if std::mem::replace(&mut self.winner, winner) != winner {
            (self.left, self.backoff) = (min_backoff + burst, min_backoff);
        }
        if self.left == 0 {
            self.backoff = (self.backoff * 2).min(max_backoff);
            self.left = self.backoff + burst;
        }
        self.left -= 1;
        match winner {
            _ if self.left >= burst => winner,
            Way::Cheap => Way::Costly,
            Way::Costly => Way::Cheap,
        }
    }

    /// A use of this way took this many nanoseconds.
    pub fn record(&mut self, way: Way, nanoseconds: u64) {
        let Terms { weight, loser_weight, .. } = *self.terms;
        let weight = if way == self.winner { weight } else { loser_weight };
        match way {
            Way::Cheap => self.cheap.add(nanoseconds, weight),
            Way::Costly => self.costly.add(nanoseconds, weight),
        }
    }

    /// The way that has won so far.
    pub fn winner(&self) -> Way {
        self.winner
    }

    /// Has the losing way tried at the next use, and often after it, because conditions have
    /// changed.
    pub fn retry(&mut self) {
        (self.left, self.backoff) = (self.terms.burst, self.terms.min_backoff);
    }
}

impl Mean {
    /// The mean; `None` before the first time.
    fn known(self) -> Option<u64> {
        (self.count > 0).then_some(self.nanoseconds)
    }

    fn add(&mut self, nanoseconds: u64, weight: u64) {
        self.count = (self.count + 1).min(weight);
        self.nanoseconds = closer(self.nanoseconds, nanoseconds, self.count);
    }
}

/// `known`, moved one part in `weight` of the way to `seen`.
pub fn closer(known: u64, seen: u64, weight: u64) -> u64 {
    (known * (weight - 1) + seen) / weight
}

#[cfg(test)]
mod tests {
    use super::*;

    static TERMS: Terms = Terms {
        first: Way::Cheap,
        min_gain: 8,
        weight: 8,
        loser_weight: 8,
        burst: 4,
        min_backoff: 16,
        max_backoff: 1024,
    };

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
        let mut trial = Trial::new(&TERMS);
        assert!((40..100).contains(&costly_uses(&mut trial, 10_000, 100, 400)));
        assert!(costly_uses(&mut trial, 10_000, 400, 100) > 9_000, "the machine is busy now");
        assert!(costly_uses(&mut trial, 10_000, 100, 400) < 100, "and idle again");
    }

    #[test]
    fn one_long_time_does_not_decide() {
        let mut trial = Trial::new(&TERMS);
        assert_eq!(costly_uses(&mut trial, u32::from(TERMS.min_backoff), 300, 100), 0);
        assert_eq!(costly_uses(&mut trial, 1, 300, 600), 1, "the first of a burst");
        assert!(costly_uses(&mut trial, 100, 300, 100) > 80);
    }

    #[test]
    fn a_gain_within_the_margin_does_not_count() {
        let mut trial = Trial::new(&TERMS);
        assert!(costly_uses(&mut trial, 10_000, 100, 90) < 100);
        assert!(costly_uses(&mut trial, 10_000, 100, 80) > 9_000);
    }
}
