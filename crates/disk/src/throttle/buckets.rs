//! The buckets of all limits of a group, and the cost of a request in them.

use std::num::NonZeroU64;
use std::time::Duration;

use super::bucket::{Bucket, Nanos};
use super::limits::{Burst, RateLimits};

/// The allowance of each bucket in addition to bursts, as a time. A timer that is late by less than
/// this loses no throughput.
const SLACK: Duration = Duration::from_millis(50);

/// The direction of a request. Each direction has limits of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Direction {
    #[default]
    Read,
    Write,
}

impl Direction {
    pub(super) const BOTH: [Self; 2] = [Self::Read, Self::Write];
}

/// The cost of a request: one operation, and its bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cost {
    pub(super) direction: Direction,
    pub(super) bytes: u64,
}

/// The share of the limits that a request takes, as a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    /// The share of the limits of all requests.
    pub(super) of_all: Nanos,
    /// The greater of `of_all` and the share of the limits of the request's direction. At least
    /// one.
    pub(super) of_direction: Nanos,
}

/// One limit: a bucket for its rate over any time, and one for the rate of bursts.
#[derive(Clone, Debug)]
struct RateBucket {
    sustained: Bucket,
    peak: Option<Bucket>,
}

impl RateBucket {
    /// A bucket that has the credit for a burst and no other tokens, so that a new limit is exact
    /// from the start.
    fn new(rate: NonZeroU64, burst: Option<Burst>, now: Nanos) -> Self {
        let saved = burst.map_or(Duration::ZERO, |burst| burst.saved_time());
        let peak = |burst: Burst| Bucket::new(rate, burst.percent(), SLACK, SLACK, now);
        Self { sustained: Bucket::new(rate, 100, SLACK + saved, SLACK, now), peak: burst.map(peak) }
    }

    fn ready_at(&self) -> Nanos {
        let peak = self.peak.as_ref().map_or(0, Bucket::ready_at);
        self.sustained.ready_at().max(peak)
    }

    fn each(&mut self, mut change: impl FnMut(&mut Bucket)) {
        change(&mut self.sustained);
        self.peak.iter_mut().for_each(change);
    }

    fn carry_over(&mut self, former: &Self, now: Nanos) {
        self.sustained.carry_over(&former.sustained, now);
        if let (Some(peak), Some(former)) = (&mut self.peak, &former.peak) {
            peak.carry_over(former, now);
        }
    }
}

/// The buckets of a group, in the order of `RateLimits::rates`.
#[derive(Debug)]
pub(super) struct Buckets {
    limits: RateLimits,
    rates: [Option<RateBucket>; 6],
}

/// The indices of the buckets (operations, bytes) that a request takes from: the buckets of all
/// requests, and the buckets of its direction.
fn indices(direction: Direction) -> [(usize, usize); 2] {
    match direction {
        Direction::Read => [(0, 3), (1, 4)],
        Direction::Write => [(0, 3), (2, 5)],
    }
}

impl Buckets {
    pub(super) fn new(limits: RateLimits, now: Nanos) -> Self {
        let rates = limits.rates().map(|rate| Some(RateBucket::new(rate?, limits.burst, now)));
        Self { limits, rates }
    }

    pub(super) fn limits(&self) -> RateLimits {
        self.limits
    }

    /// Applies other limits. A limit that stays set keeps its credit or debt, as far as the new
    /// limit allows.
    pub(super) fn set_limits(&mut self, limits: RateLimits, now: Nanos) {
        let former = std::mem::replace(self, Self::new(limits, now));
        for (bucket, former) in self.rates.iter_mut().zip(&former.rates) {
            if let (Some(bucket), Some(former)) = (bucket, former) {
                bucket.carry_over(former, now);
            }
        }
    }

    /// The time from which a request of this direction may be admitted, whatever its cost. A time
    /// in the past means now.
    pub(super) fn ready_at(&self, direction: Direction) -> Nanos {
        let ready = |index: usize| self.rates[index].as_ref().map_or(0, RateBucket::ready_at);
        let each =
            indices(direction).map(|(operations, bytes)| ready(operations).max(ready(bytes)));
        each[0].max(each[1])
    }

    /// Whether a request takes from any bucket. A discard takes nothing from those of bytes.
    pub(super) fn charge(&self, cost: Cost) -> bool {
        indices(cost.direction).into_iter().any(|(operations, bytes)| {
            self.rates[operations].is_some() || cost.bytes > 0 && self.rates[bytes].is_some()
        })
    }

    /// Takes the cost of a request.
    pub(super) fn take(&mut self, cost: Cost, now: Nanos) {
        self.change(cost, |bucket, tokens| bucket.take(tokens, now));
    }

    /// Returns the cost of a request that was not carried out.
    pub(super) fn put_back(&mut self, cost: Cost) {
        self.change(cost, Bucket::put_back);
    }

    fn change(&mut self, cost: Cost, change: impl Fn(&mut Bucket, u64)) {
        for (operations, bytes) in indices(cost.direction) {
            for (index, tokens) in [(operations, 1), (bytes, cost.bytes)] {
                if let Some(rate) = &mut self.rates[index] {
                    rate.each(|bucket| change(bucket, tokens));
                }
            }
        }
    }

    /// The time that a request takes of the limit that it uses most.
    pub(super) fn share(&self, cost: Cost) -> Share {
        let time = |index: usize, tokens| {
            self.rates[index].as_ref().map_or(0, |rate| rate.sustained.time_of(tokens))
        };
        let [of_all, of_direction] = indices(cost.direction)
            .map(|(operations, bytes)| time(operations, 1).max(time(bytes, cost.bytes)));
        Share { of_all, of_direction: of_direction.max(of_all).max(1) }
    }
}
