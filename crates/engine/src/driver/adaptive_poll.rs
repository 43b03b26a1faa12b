//! Adaptive polling: whether a loop that has nothing to do busy-polls for a moment before it
//! sleeps.
//!
//! A sleep and its wake-up cost more time than many requests take. So busy-polling saves time if
//! the next event comes soon, and otherwise wastes processor time. The loop keeps a decaying
//! estimate for each *source* of an event (a read of that file that completed, a write of it that
//! was submitted, a message on that socket): how soon the next event followed. Example: the loop
//! sleeps after it has submitted a write to a slow disk, and polls after that write has completed,
//! if the guest's next request follows quickly. So one slow source does not stop the polling for
//! the others.
//!
//! Busy-polling gains nothing if the device dominates the latency, or if the producer of the event
//! needs this processor. So the loop sometimes tries the other choice (a probe) and keeps the one
//! after which the next event comes sooner.
//!
//! Guarantees: no memory is allocated after the start. Wasted polling takes at most an eighth of
//! the time in which the loop works, beyond a short burst. So a loop whose events come just after
//! it stops polling costs little more than one that never polls. A loop without events costs
//! nothing, since only an event ends its sleep.

use std::os::fd::RawFd;
use std::time::Duration;

use blockhouse_core::metrics::Timestamp;
use blockhouse_core::trial::{Terms, Trial, Way, closer};

use crate::driver::operation::Operation;

/// The default of the longest time for which a loop busy-polls before it sleeps.
pub const DEFAULT_POLLING: Duration = Duration::from_micros(50);

/// How many estimates there are. Sources that share an estimate only make it less exact.
const ESTIMATES: usize = 1024;

/// An interval is recorded as at most this many times the longest poll time, so that the estimate
/// falls within few events when a source becomes fast again.
const MAX_INTERVAL: u64 = 4;

/// An estimate moves a quarter of the way to each interval that is seen.
const WEIGHT: u64 = 4;

/// If the estimate is above the limit, but events are not rare, one wait in this many still polls:
/// the estimate of a sleeping loop includes the time of the wake-up.
const PROBE_ONE_IN: u32 = 8;

/// A loop may waste an eighth of its working time.
const WASTE_SHARE: u64 = 8;
/// The maximum budget of wasted time that a loop accumulates, in nanoseconds, unless one poll may
/// take longer.
const MAX_BUDGET: u64 = 1_000_000;

/// Polling takes a processor, so it must save an eighth. The burst is one use, because several
/// sleeps in a row would raise the interval by their wake-ups.
static TERMS: Terms = Terms {
    first: Way::Costly,
    min_gain: 8,
    weight: 8,
    loser_weight: 8,
    burst: 1,
    min_backoff: 16,
    max_backoff: 1024,
};

/// The source of an event: an index of the table of estimates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EventSource(u16);

/// The event of an operation that is an event source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Submitted,
    Completed,
}

impl EventSource {
    /// A message of another thread.
    pub(crate) const MESSAGE: Self = Self(0);

    /// An event of a watched descriptor.
    pub(crate) fn of_watch(descriptor: RawFd) -> Self {
        // The watch shares its estimate with `accept`, which no task calls on this descriptor.
        Self((((descriptor as usize) << 4 | 15) % ESTIMATES) as u16)
    }

    /// `None` for the submission of an operation that waits for a peer or a driver, because that
    /// event does not predict the next one.
    pub(crate) fn of(operation: &Operation, phase: Phase) -> Option<Self> {
        if operation.waits_for_others() && phase == Phase::Submitted {
            return None;
        }
        let (descriptor, kind) = operation.identity();
        let kind = kind << 1 | usize::from(phase == Phase::Completed);
        // Descriptors are small numbers; a file's sources are next to each other.
        Some(Self((((descriptor as usize) << 4 | kind) % ESTIMATES) as u16))
    }
}

/// The estimate of the events after one source. All times are in nanoseconds.
#[derive(Clone)]
struct Estimate {
    /// How soon the next event follows.
    interval: u64,
    /// The intervals of waits in which the loop slept (cheap), and polled (costly).
    trial: Trial,
}

/// Decides for one loop how long it polls.
pub(crate) struct PollGovernor {
    max_poll_time: u64,
    /// The estimates, by source.
    estimates: Box<[Estimate]>,
    /// The source of the last event.
    last: EventSource,
    /// The source of the last event before the present wait.
    waiting_after: EventSource,
    /// The number of waits, modulo [`PROBE_ONE_IN`], in which the estimate was against polling but
    /// events were not rare.
    declined: u32,
    budget: u64,
    /// The end of the last wait; during a wait, its start. From the end of a wait until the next
    /// wait the loop works.
    works_since: Option<Timestamp>,
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PollResult {
    /// The event arrived while the loop polled.
    Hit,
    /// The loop slept, after it had polled for this time without an event.
    Slept { wasted: Duration },
}

impl PollGovernor {
    pub(crate) fn new(max_poll_time: Duration) -> Self {
        let max_poll_time = nanoseconds(max_poll_time);
        Self {
            max_poll_time,
            estimates: vec![Estimate::new(max_poll_time); ESTIMATES].into_boxed_slice(),
            last: EventSource::MESSAGE,
            waiting_after: EventSource::MESSAGE,
            declined: 0,
            budget: MAX_BUDGET.max(max_poll_time),
            works_since: None,
        }
    }

    /// Records an event.
    pub(crate) fn note_event(&mut self, source: EventSource) {
        self.last = source;
    }

    /// How long to poll in a wait that begins `now`; `None` to sleep at once.
    pub(crate) fn poll_time(&mut self, now: Timestamp) -> Option<Duration> {
        if self.max_poll_time == 0 {
            return None;
        }
        self.refill(now);
        self.waiting_after = self.last;
        let rare = MAX_INTERVAL * self.max_poll_time;
        let estimate = &mut self.estimates[usize::from(self.last.0)];
        let worthwhile = match estimate.interval {
            interval if interval <= self.max_poll_time => estimate.trial.choose() == Way::Costly,
            interval => {
                // The old comparison was made under other conditions.
                *estimate = Estimate::new(interval);
                interval < rare * 3 / 4 && self.is_probe()
            }
        };
        let poll_time = worthwhile && self.budget >= self.max_poll_time;
        poll_time.then(|| Duration::from_nanos(self.max_poll_time))
    }

    fn is_probe(&mut self) -> bool {
        self.declined = (self.declined + 1) % PROBE_ONE_IN;
        self.declined == 0
    }

    fn refill(&mut self, now: Timestamp) {
        let worked = self.works_since.replace(now).map_or(0, |then| now.nanoseconds_since(then));
        let max_budget = MAX_BUDGET.max(self.max_poll_time);
        self.budget = self.budget.saturating_add(worked / WASTE_SHARE).min(max_budget);
    }

    /// Updates the estimate after a wait with [`poll_time`](Self::poll_time): the next event came
    /// after `interval`.
    pub(crate) fn update(&mut self, interval: Duration, outcome: PollResult) {
        self.works_since = self.works_since.map(|began| began + interval);
        let interval = nanoseconds(interval).min(MAX_INTERVAL * self.max_poll_time);
        let estimate = &mut self.estimates[usize::from(self.waiting_after.0)];
        match outcome {
            // A larger estimate was measured with sleeps, and is outdated.
            PollResult::Hit => estimate.interval = estimate.interval.min(self.max_poll_time),
            PollResult::Slept { wasted } => {
                self.budget = self.budget.saturating_sub(nanoseconds(wasted));
            }
        }
        estimate.interval = closer(estimate.interval, interval, WEIGHT);
        let way = match outcome {
            PollResult::Slept { wasted: Duration::ZERO } => Way::Cheap,
            PollResult::Hit | PollResult::Slept { .. } => Way::Costly,
        };
        estimate.trial.record(way, interval);
    }
}

impl Estimate {
    fn new(interval: u64) -> Self {
        Self { interval, trial: Trial::new(&TERMS) }
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
