//! Events of requests that the host failed.
//!
//! Guarantee: at most one event of a kind (an operation and an errno) is reported in each
//! [`INTERVAL`], however many requests fail. The first failure is reported at once; the next event
//! has the number of failures since then.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use blockhouse_core::ErrorKind;
use blockhouse_disk::{FailedRequest, Operation};
use parking_lot::Mutex;

use crate::events::{Event, Events};

/// The shortest time between two events of one kind.
const INTERVAL: Duration = Duration::from_secs(10);

/// Reports the failures of one disk.
pub(crate) struct FailureTeller {
    disk: String,
    events: Events,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    has_lost_flush: bool,
    /// Bounded: an entry for each pair of an operation and an errno.
    kinds: BTreeMap<(&'static str, i32), Recent>,
}

/// Failures of one kind.
struct Recent {
    told: Instant,
    untold: u64,
}

impl FailureTeller {
    /// A reporter for a disk of this name. `has_lost_flush`: whether a flush has failed before.
    pub(crate) fn new(disk: String, events: Events, has_lost_flush: bool) -> Self {
        let state = Mutex::new(State { has_lost_flush, ..State::default() });
        Self { disk, events, state }
    }

    /// Records a failed request, and reports it if an event is due.
    pub(crate) fn tell(&self, failed: &FailedRequest<'_>) {
        self.tell_at(failed, Instant::now());
    }

    fn tell_at(&self, failed: &FailedRequest<'_>, now: Instant) {
        let FailedRequest { operation, error, has_lost_flush } = *failed;
        let (disk, message, errno) = (self.disk.clone(), error.to_string(), error.errno());
        let (is_new_loss, count) = {
            let mut state = self.state.lock();
            let is_new_loss =
                has_lost_flush && !std::mem::replace(&mut state.has_lost_flush, has_lost_flush);
            (is_new_loss, state.due(operation, errno, now))
        };
        if is_new_loss {
            let (disk, message) = (disk.clone(), message.clone());
            self.events.tell(Event::FlushFailed { disk, errno, message });
        }
        let Some(count) = count else { return };
        let operation = operation.as_str();
        self.events.tell(match error.kind() {
            ErrorKind::NoSpace => Event::NoSpace { disk, operation, message, count },
            _ => Event::DiskError { disk, operation, errno, message, count },
        });
    }
}

impl State {
    /// The number of failures to report if an event is due; `None` if it is too early for an event.
    fn due(&mut self, operation: Operation, errno: i32, now: Instant) -> Option<u64> {
        let kind = (operation.as_str(), errno);
        match self.kinds.get_mut(&kind) {
            Some(recent) if now.saturating_duration_since(recent.told) < INTERVAL => {
                recent.untold += 1;
                None
            }
            recent => {
                let untold = recent.map_or(0, |recent| recent.untold);
                self.kinds.insert(kind, Recent { told: now, untold: 0 });
                Some(untold + 1)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use blockhouse_core::Error;
    use futures_util::FutureExt;

    use super::*;

    fn failed(error: &Error, has_lost_flush: bool) -> FailedRequest<'_> {
        FailedRequest { operation: Operation::Write, error, has_lost_flush }
    }

    #[test]
    fn one_of_a_kind_is_told_within_the_interval_and_how_many_there_were() {
        let events = Events::default();
        let subscription = events.subscribe();
        let next = || subscription.next().now_or_never();
        let teller = FailureTeller::new("a".into(), events.clone(), false);
        let (begin, error) = (Instant::now(), Error::new(ErrorKind::Io, "no"));
        (0..5).for_each(|_| teller.tell_at(&failed(&error, false), begin));
        let told = |count| Event::DiskError {
            disk: "a".into(),
            operation: "write",
            errno: 5,
            message: "no".into(),
            count,
        };
        assert_eq!((next(), next()), (Some(told(1)), None));
        // Another kind does not wait.
        let full = Error::new(ErrorKind::NoSpace, "full");
        teller.tell_at(&failed(&full, false), begin);
        assert_eq!(next().map(|event| event.name()), Some("disk.no-space"));
        teller.tell_at(&failed(&error, false), begin + INTERVAL);
        assert_eq!(next(), Some(told(5)));
    }

    #[test]
    fn a_lost_flush_is_told_once() {
        let events = Events::default();
        let subscription = events.subscribe();
        let names =
            || std::iter::from_fn(|| subscription.next().now_or_never()).map(|event| event.name());
        let error = Error::new(ErrorKind::Io, "no");
        let teller = FailureTeller::new("a".into(), events.clone(), false);
        (0..3).for_each(|_| teller.tell(&failed(&error, true)));
        assert_eq!(names().collect::<Vec<_>>(), ["disk.flush-failed", "disk.error"]);
        let teller = FailureTeller::new("a".into(), events.clone(), true);
        teller.tell(&failed(&error, true));
        assert_eq!(names().collect::<Vec<_>>(), ["disk.error"]);
    }
}
