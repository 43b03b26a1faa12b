//! Whether a loop that has nothing to do looks out for the next event for a moment before it sleeps.
//!
//! Sleeping and being woken costs more than many requests do. Looking out pays where the next event
//! comes soon, and is waste where it does not; what came before tells which of the two it is. So the
//! loop keeps, for each *source* of what happened last (a completed read of that file, a write of it
//! begun, a message on that socket), a decaying estimate of how soon the next event followed. After
//! a slow disk's write began it sleeps; after that write completed, when the guest's next request
//! follows quickly, it looks out: one slow source does not speak for the others.
//!
//! And an event that comes soon need not come sooner for being looked out for: where a disk takes most
//! of the time, or somebody else needs the processor to make the event, looking out gains nothing. So
//! now and then the loop does the other thing, and keeps to what the next event follows sooner after.
//!
//! Promises: no memory is taken after the start; looking out in vain takes at most a tenth of a
//! processor beyond a short burst; a loop without events costs nothing, since only an event can end
//! its sleep.

use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use crate::operation::Operation;

/// How long a loop looks out at most, where nothing else is asked for.
pub const DEFAULT_POLLING: Duration = Duration::from_micros(50);

/// Places for estimates. Sources that share one spoil each other's estimates, and nothing else.
const PLACES: usize = 1024;

/// A gap counts as at most this many times the longest look-out, so that the estimate comes down
/// within few events when a source becomes quick again.
const MAX_GAP: u64 = 4;

/// An estimate moves this fraction of the way to each gap that is seen; a comparison more slowly, since
/// single gaps differ by more than what is compared.
const WEIGHT: u64 = 4;
const CALM_WEIGHT: u64 = 8;

/// Looking out pays where it makes the gap shorter by this fraction at least.
const GAIN: u64 = 8;

/// After how many rests the other thing is tried, at first and when it has been tried often in vain.
const FIRST_PATIENCE: u16 = 16;
const LAST_PATIENCE: u16 = 256;

/// Where the estimate is above the limit, but events are not rare either, one look-out in this many
/// is done all the same: a gap that was slept through includes the time that waking takes.
const TRIAL: u32 = 8;

/// The part of its time that a loop may look out in vain, and how much of that can be saved up.
const SHARE: u64 = 10;
const SAVINGS: u64 = 1_000_000;

/// Whatever an event's effect on the next one is known by: a place in the table of estimates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Source(u16);

/// What of an operation happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Begun,
    Over,
}

impl Source {
    /// Another thread's note.
    pub(crate) const NOTE: Self = Self(0);

    /// An event of a watched descriptor.
    pub(crate) fn of_watch(descriptor: RawFd) -> Self {
        // Shares its place with the accepting of connections, which nobody does on this descriptor.
        Self((((descriptor as usize) << 4 | 15) % PLACES) as u16)
    }

    /// `None` where it says nothing: that an operation begins which waits for a peer.
    pub(crate) fn of(operation: &Operation, phase: Phase) -> Option<Self> {
        if operation.is_on_socket() && phase == Phase::Begun {
            return None;
        }
        let (descriptor, kind) = operation.identity();
        let kind = kind << 1 | usize::from(phase == Phase::Over);
        // Descriptors are small numbers; a file's sources are next to each other.
        Some(Self((((descriptor as usize) << 4 | kind) % PLACES) as u16))
    }
}

/// What is known of the events after one source. All times are in nanoseconds.
#[derive(Clone)]
struct Estimate {
    /// How soon the next event follows.
    gap: u64,
    /// The same of those gaps that were looked through, and of those slept through, if there were any.
    looked: Option<u64>,
    slept: Option<u64>,
    /// Whether looking out paid when that was last asked.
    pays: bool,
    /// Rests until the other thing is tried, and how many there were the last time.
    until_trial: u16,
    patience: u16,
}

/// The estimates of one loop.
pub(crate) struct Poller {
    at_most: u64,
    /// By source.
    estimates: Box<[Estimate]>,
    /// What happened last, and what had when the rest began: its end is another event.
    last: Source,
    rests_after: Source,
    /// Look-outs that the estimate spoke against.
    refused: u32,
    allowance: u64,
    renewed: Option<Instant>,
}

/// How a rest ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The event came while the loop looked out.
    Caught,
    /// The loop slept, having looked out in vain for so long.
    Slept { in_vain: Duration },
}

impl Poller {
    pub(crate) fn new(at_most: Duration) -> Self {
        let at_most = nanoseconds(at_most);
        Self {
            at_most,
            estimates: vec![Estimate::new(at_most); PLACES].into_boxed_slice(),
            last: Source::NOTE,
            rests_after: Source::NOTE,
            refused: 0,
            allowance: SAVINGS,
            renewed: None,
        }
    }

    /// Notes what happened.
    pub(crate) fn happened(&mut self, source: Source) {
        self.last = source;
    }

    /// How long to look out in a rest that begins `now`.
    pub(crate) fn window(&mut self, now: Instant) -> Option<Duration> {
        if self.at_most == 0 {
            return None;
        }
        self.renew(now);
        self.rests_after = self.last;
        let rare = MAX_GAP * self.at_most;
        let estimate = &mut self.estimates[usize::from(self.last.0)];
        let worthwhile = match estimate.gap {
            gap if gap <= self.at_most => estimate.speaks_for_looking(),
            gap => {
                // What was found out was of other times.
                *estimate = Estimate::new(gap);
                gap < rare * 3 / 4 && self.is_trial()
            }
        };
        let window = worthwhile && self.allowance >= self.at_most;
        window.then(|| Duration::from_nanos(self.at_most))
    }

    fn is_trial(&mut self) -> bool {
        self.refused = (self.refused + 1) % TRIAL;
        self.refused == 0
    }

    fn renew(&mut self, now: Instant) {
        let since = self.renewed.replace(now).map_or(0, |then| nanoseconds(now - then));
        self.allowance = self.allowance.saturating_add(since / SHARE).min(SAVINGS);
    }

    /// Learns from the rest that was asked about last: it took so long, and the next event ended it.
    pub(crate) fn learn(&mut self, gap: Duration, outcome: Outcome) {
        let gap = nanoseconds(gap).min(MAX_GAP * self.at_most);
        let estimate = &mut self.estimates[usize::from(self.rests_after.0)];
        match outcome {
            // What was learnt asleep is outdated.
            Outcome::Caught => estimate.gap = estimate.gap.min(self.at_most),
            Outcome::Slept { in_vain } => {
                self.allowance = self.allowance.saturating_sub(nanoseconds(in_vain));
            }
        }
        estimate.gap = closer(estimate.gap, gap, WEIGHT);
        let way = match outcome {
            Outcome::Slept { in_vain: Duration::ZERO } => &mut estimate.slept,
            Outcome::Caught | Outcome::Slept { .. } => &mut estimate.looked,
        };
        *way = Some(way.map_or(gap, |known| closer(known, gap, CALM_WEIGHT)));
    }
}

impl Estimate {
    fn new(gap: u64) -> Self {
        let (until_trial, patience) = (FIRST_PATIENCE, FIRST_PATIENCE);
        Self { gap, looked: None, slept: None, pays: true, until_trial, patience }
    }

    /// What has paid so far, or for once the other thing.
    fn speaks_for_looking(&mut self) -> bool {
        let pays = match (self.looked, self.slept) {
            (Some(looked), Some(slept)) => looked < slept - slept / GAIN,
            _ => true,
        };
        if std::mem::replace(&mut self.pays, pays) != pays {
            self.patience = FIRST_PATIENCE;
            self.until_trial = FIRST_PATIENCE;
        }
        if self.until_trial > 0 {
            self.until_trial -= 1;
            return pays;
        }
        self.patience = (self.patience * 2).min(LAST_PATIENCE);
        self.until_trial = self.patience;
        !pays
    }
}

/// `known`, moved a fraction of the way to what was seen.
fn closer(known: u64, seen: u64, weight: u64) -> u64 {
    (known * (weight - 1) + seen) / weight
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
