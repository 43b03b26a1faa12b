//! A trial of two ways to do the same work: the way that takes less time is used, and the other one
//! is tried again now and then, because conditions change.
//!
//! Guarantees: the cost of the trial is bounded. The losing way is used once in [`MIN_BACKOFF`]
//! times at first, and once in [`MAX_BACKOFF`] times if it keeps losing.

/// A time moves only this fraction of the way to each time that is seen, because single times
/// differ by more than the two ways do.
const WEIGHT: u64 = 8;

/// The costly way wins if it makes the time shorter by at least one part in this many.
const MIN_GAIN: u64 = 8;

/// The number of uses before the losing way is tried again, at first.
const MIN_BACKOFF: u16 = 16;
/// The number of uses before the losing way is tried again, after it has lost often.
const MAX_BACKOFF: u16 = 256;

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
    /// Nanoseconds; `None` before the first use.
    cheap: Option<u64>,
    costly: Option<u64>,
    /// The way that is used until both times are known.
    first: Way,
    winner: Way,
    /// The number of uses left before the losing way is tried.
    until_retry: u16,
    /// The value at which `until_retry` starts.
    backoff: u16,
}

impl Trial {
    /// A trial that begins with the way `first`.
    pub(crate) fn new(first: Way) -> Self {
        let (until_retry, backoff) = (MIN_BACKOFF, MIN_BACKOFF);
        Self { cheap: None, costly: None, first, winner: first, until_retry, backoff }
    }

    /// The way for the next use: the winner, or the loser for one use.
    pub(crate) fn choose(&mut self) -> Way {
        let winner = match (self.cheap, self.costly) {
            (Some(cheap), Some(costly)) if costly < cheap - cheap / MIN_GAIN => Way::Costly,
            (Some(_), Some(_)) => Way::Cheap,
            _ => self.first,
        };
        if std::mem::replace(&mut self.winner, winner) != winner {
            self.backoff = MIN_BACKOFF;
            self.until_retry = MIN_BACKOFF;
        }
        if self.until_retry > 0 {
            self.until_retry -= 1;
            return winner;
        }
        self.backoff = (self.backoff * 2).min(MAX_BACKOFF);
        self.until_retry = self.backoff;
        match winner {
            Way::Cheap => Way::Costly,
            Way::Costly => Way::Cheap,
        }
    }

    /// A use of this way took this many nanoseconds.
    pub(crate) fn record(&mut self, way: Way, nanoseconds: u64) {
        let time = match way {
            Way::Cheap => &mut self.cheap,
            Way::Costly => &mut self.costly,
        };
        *time = Some(time.map_or(nanoseconds, |known| closer(known, nanoseconds, WEIGHT)));
    }

    /// The times of the cheap and the costly way, in nanoseconds.
    #[cfg(test)]
    pub(crate) fn times(&self) -> (Option<u64>, Option<u64>) {
        (self.cheap, self.costly)
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
        let mut trial = Trial::new(Way::Cheap);
        assert!((30..100).contains(&costly_uses(&mut trial, 10_000, 100, 400)));
        assert!(costly_uses(&mut trial, 10_000, 400, 100) > 9_000, "the machine is busy now");
        assert!(costly_uses(&mut trial, 10_000, 100, 400) < 100, "and idle again");
    }

    #[test]
    fn a_gain_within_the_margin_does_not_count() {
        let mut trial = Trial::new(Way::Cheap);
        assert!(costly_uses(&mut trial, 10_000, 100, 90) < 100);
        assert!(costly_uses(&mut trial, 10_000, 100, 80) > 9_000);
    }
}
