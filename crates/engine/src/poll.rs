//! Whether a loop that has nothing to do looks out for the next event for a moment before it sleeps.
//!
//! Sleeping and being woken costs more than many requests do. Looking out pays where the next event
//! comes soon, and is waste where it does not; what came before tells which of the two it is. So the
//! loop keeps, for each *source* of what happened last (a completed read of that file, a write of it
//! begun, a message on that socket), a decaying estimate of how soon the next event followed. After
//! a slow disk's write began it sleeps; after that write completed, when the guest's next request
//! follows quickly, it looks out: one slow source does not speak for the others.
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
const LONGEST_GAP: u64 = 4;

/// An estimate moves this fraction of the way to each gap that is seen.
const WEIGHT: u64 = 4;

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

/// The estimates of one loop. All times are in nanoseconds.
pub(crate) struct Poller {
    at_most: u64,
    /// By source: how soon the next event follows.
    estimates: Box<[u64]>,
    /// What happened last.
    last: Source,
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
            estimates: vec![at_most; PLACES].into_boxed_slice(),
            last: Source::NOTE,
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
        let estimate = self.estimates[usize::from(self.last.0)];
        let rare = LONGEST_GAP * self.at_most;
        let worthwhile = estimate <= self.at_most || (estimate < rare * 3 / 4 && self.is_trial());
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

    /// Learns from a rest of that length, which the next event ended.
    pub(crate) fn learn(&mut self, gap: Duration, outcome: Outcome) {
        let estimate = &mut self.estimates[usize::from(self.last.0)];
        match outcome {
            // What was learnt asleep is outdated.
            Outcome::Caught => *estimate = (*estimate).min(self.at_most),
            Outcome::Slept { in_vain } => {
                self.allowance = self.allowance.saturating_sub(nanoseconds(in_vain));
            }
        }
        let gap = nanoseconds(gap).min(LONGEST_GAP * self.at_most);
        *estimate = (*estimate * (WEIGHT - 1) + gap) / WEIGHT;
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
