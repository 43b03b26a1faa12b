//! Changes that get ENOSPC, and wait until there is free space on the host (`OnFull::Hold`).
//!
//! - A held change is not in flight to the disk: it holds no claim on its range, and no `Quiesce`
//!   waits for it. So reads, other writes, snapshots and the disk's end do not wait for it.
//! - One change is retried every [`LOOK`]; if it succeeds, all others are retried.
//!   [`Hold::release`] retries all at once.
//! - The observer is notified of each *crossing*: the first change is held, or the last held change
//!   ends. The observer gets one call for each crossing, however many changes wait.
//! - Once holding has [ended](Hold::end), held changes fail with ENOSPC, and so does each later
//!   change that gets ENOSPC. [`PartyHold`](super::held_changes::PartyHold) ends holding for one
//!   party only, such as a guest's queue, because the end of a queue must not wait for free space.
//!
//! Only event loops have timers. Elsewhere, as in the simulator, a held change sleeps until
//! [`Hold::release`] or the end of holding wakes it.

use std::future::pending;
use std::pin::pin;
use std::sync::OnceLock;
use std::time::Duration;

use blockhouse_core::metrics::{Timestamp, clock};
use blockhouse_core::sync::Condvar;
use blockhouse_engine::{current_party, has_timers, sleep};
use futures_util::future::select;
use parking_lot::Mutex;

/// Interval of the retries.
const LOOK: Duration = Duration::from_secs(1);

/// Events of a disk whose changes get ENOSPC: holding begins, or is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HoldChange {
    /// The first change is held.
    Held {
        /// The ENOSPC error, in one line.
        message: String,
    },
    /// No change is held.
    Released {
        /// How long changes were held.
        time: Duration,
        /// How many held changes did not succeed: limit, end of holding, other error, dropped
        /// future.
        failed: u64,
    },
}

/// The callback for each crossing. The callback must not wait.
pub type HoldObserver = Box<dyn Fn(HoldChange) + Send + Sync>;

/// The changes of a disk that wait for free space. See the module's page.
#[derive(Default)]
pub struct Hold {
    state: Mutex<State>,
    changed: Condvar,
    observer: OnceLock<HoldObserver>,
}

#[derive(Default)]
struct State {
    /// Changes that are held, including those that are being retried.
    held: u64,
    /// Held changes that have failed since the first one was held.
    failed: u64,
    since: Option<Timestamp>,
    /// Incremented for each sign that there is free space.
    releases: u64,
    last_look: Option<Timestamp>,
    has_ended: bool,
    /// The parties whose changes are no longer held.
    ended_parties: Vec<usize>,
}

/// Why a wait is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wake {
    /// There may be free space: the change is retried.
    Retry,
    /// The limit is reached, or holding has ended, for all changes or for this party's.
    GiveUp,
}

/// A held change. The drop of the guard ends its hold.
pub(super) struct HeldGuard<'a> {
    hold: &'a Hold,
    deadline: Timestamp,
    /// The number of releases before the last try of the change.
    seen: u64,
    /// The party whose change is held.
    party: usize,
    outcome: Outcome,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Stored,
    Failed,
}

impl Hold {
    /// How many changes are held because of ENOSPC.
    pub fn count(&self) -> u64 {
        self.state.lock().held
    }

    /// Reports to `observer` when the first change is held, and when the last held change ends. A
    /// disk keeps its first observer.
    pub fn observe(&self, observer: HoldObserver) {
        // A second observer is ignored.
        let _ = self.observer.set(observer);
    }

    /// Number of releases so far. The caller reads it before it tries a change.
    pub(super) fn releases(&self) -> u64 {
        self.state.lock().releases
    }

    /// Retries all held changes: there may be free space now.
    pub fn release(&self) {
        self.state.lock().releases += 1;
        self.changed.notify_all();
    }

    /// Fails held changes with ENOSPC, and each later change that gets ENOSPC. For an orderly end
    /// of the disk.
    pub fn end(&self) {
        self.state.lock().has_ended = true;
        self.changed.notify_all();
    }

    /// Fails the held changes of this party, and holds none of its changes from now on.
    pub(super) fn end_party(&self, party: usize) {
        self.state.lock().ended_parties.push(party);
        self.changed.notify_all();
    }

    /// Forgets a party that has ended, because another party may get its number.
    pub(super) fn forget_party(&self, party: usize) {
        self.state.lock().ended_parties.retain(|&one| one != party);
    }

    /// Holds a change that got ENOSPC, for `limit` at most. `seen` is the number of
    /// [releases](Self::releases) before the change was tried. `None` if holding has ended, for all
    /// changes or for the current party's.
    pub(super) fn begin(
        &self,
        seen: u64,
        limit: Duration,
        message: impl FnOnce() -> String,
    ) -> Option<HeldGuard<'_>> {
        let now = clock::read_now();
        let party = current_party();
        let is_first = {
            let mut state = self.state.lock();
            if state.has_ended_for(party) {
                return None;
            }
            state.held += 1;
            if state.held == 1 {
                (state.since, state.failed) = (Some(now), 0);
                // The change was just tried.
                state.last_look = Some(now);
            }
            state.held == 1
        };
        if is_first {
            self.tell(HoldChange::Held { message: message() });
        }
        let deadline = now + limit;
        Some(HeldGuard { hold: self, deadline, seen, party, outcome: Outcome::Failed })
    }

    fn tell(&self, change: HoldChange) {
        if let Some(observer) = self.observer.get() {
            observer(change);
        }
    }
}

impl State {
    fn has_ended_for(&self, party: usize) -> bool {
        self.has_ended || self.ended_parties.contains(&party)
    }

    /// Returns why a change of `party` stops waiting; `None` if it waits on. `seen` is the number
    /// of releases that the change has seen.
    fn wake(
        &mut self,
        seen: &mut u64,
        party: usize,
        deadline: Timestamp,
        now: Timestamp,
    ) -> Option<Wake> {
        if self.has_ended_for(party) || now >= deadline {
            return Some(Wake::GiveUp);
        }
        let is_due = self.last_look.is_none_or(|last| now.since(last) >= LOOK);
        if self.releases == *seen && !is_due {
            return None;
        }
        if self.releases == *seen {
            self.last_look = Some(now);
        }
        *seen = self.releases;
        Some(Wake::Retry)
    }

    /// How long a change waits before it checks whether it may retry.
    fn next_look(&self, deadline: Timestamp, now: Timestamp) -> Duration {
        let look = self.last_look.map_or(LOOK, |last| LOOK.saturating_sub(now.since(last)));
        look.min(deadline.since(now))
    }
}

impl HeldGuard<'_> {
    /// Waits until there may be free space for the change, or until it fails.
    pub(super) async fn wait(&mut self) -> Wake {
        loop {
            let changed = self.hold.changed.listen();
            let next = {
                let now = clock::read_now();
                let mut state = self.hold.state.lock();
                if let Some(wake) = state.wake(&mut self.seen, self.party, self.deadline, now) {
                    return wake;
                }
                state.next_look(self.deadline, now)
            };
            if has_timers() {
                _ = select(pin!(changed), pin!(sleep(next))).await
            } else {
                _ = select(pin!(changed), pin!(pending::<()>())).await
            }
        }
    }

    /// Ends the hold of a change that found free space, and retries the other held changes.
    pub(super) fn found_room(mut self) {
        self.outcome = Outcome::Stored;
        self.hold.release();
    }
}

impl Drop for HeldGuard<'_> {
    fn drop(&mut self) {
        let released = {
            let mut state = self.hold.state.lock();
            state.held -= 1;
            state.failed += u64::from(self.outcome == Outcome::Failed);
            let since = if state.held == 0 { state.since.take() } else { None };
            since.map(|since| (clock::read_now().since(since), state.failed))
        };
        if let Some((time, failed)) = released {
            self.hold.tell(HoldChange::Released { time, failed });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::task::{Context, Poll, Waker};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(300);

    fn poll<F: Future>(future: &mut std::pin::Pin<&mut F>) -> Option<F::Output> {
        match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    fn held(hold: &Hold) -> HeldGuard<'_> {
        hold.begin(hold.releases(), LIMIT, || "full".into()).expect("it holds")
    }

    #[test]
    fn a_crossing_is_told_once_however_many_changes_wait() {
        let (hold, told) = (Hold::default(), Arc::new(Mutex::new(Vec::new())));
        let log = Arc::clone(&told);
        hold.observe(Box::new(move |change| log.lock().push(change)));
        for failed in [0, 1] {
            let (mut one, other) = (held(&hold), held(&hold));
            assert_eq!(hold.count(), 2);
            {
                let mut waiting = pin!(one.wait());
                assert_eq!(poll(&mut waiting), None);
                match failed {
                    0 => other.found_room(),
                    _ => drop(other),
                }
                assert_eq!(poll(&mut waiting), (failed == 0).then_some(Wake::Retry));
            }
            one.found_room();
            assert_eq!(hold.count(), 0);
            let mut told = told.lock();
            let first = HoldChange::Held { message: "full".into() };
            assert!(matches!(&told[..], [held, HoldChange::Released { failed: count, .. }]
                if *held == first && *count == failed));
            told.clear();
        }
    }

    #[test]
    fn a_release_before_the_wait_is_not_missed() {
        let hold = Hold::default();
        let seen = hold.releases();
        hold.release();
        let mut guard = hold.begin(seen, LIMIT, String::new).expect("it holds");
        assert_eq!(poll(&mut pin!(guard.wait())), Some(Wake::Retry));
        assert_eq!(poll(&mut pin!(guard.wait())), None);
    }

    #[test]
    fn nothing_is_held_after_the_end() {
        let hold = Hold::default();
        let mut guard = held(&hold);
        hold.end();
        assert_eq!(poll(&mut pin!(guard.wait())), Some(Wake::GiveUp));
        assert!(hold.begin(0, LIMIT, String::new).is_none());
    }

    #[test]
    fn a_party_ends_for_itself() {
        let hold = Hold::default();
        let mut guard = held(&hold);
        hold.end_party(7);
        assert_eq!(poll(&mut pin!(guard.wait())), None, "another party");
        hold.end_party(0);
        assert_eq!(poll(&mut pin!(guard.wait())), Some(Wake::GiveUp));
        assert!(hold.begin(0, LIMIT, String::new).is_none());
        hold.forget_party(0);
        assert!(hold.begin(0, LIMIT, String::new).is_some(), "another one has its number");
    }

    #[test]
    fn one_change_looks_every_second_and_gives_up_at_its_limit() {
        let begin = clock::read_now();
        let mut state = State { last_look: Some(begin), ..State::default() };
        let (deadline, second) = (begin + 3 * LOOK, LOOK);
        let mut wake = |time| state.wake(&mut 0, 0, deadline, begin + time);
        assert_eq!(wake(second / 2), None);
        assert_eq!(wake(second), Some(Wake::Retry));
        assert_eq!(wake(second), None, "another one has just looked");
        assert_eq!(wake(2 * second), Some(Wake::Retry));
        assert_eq!(wake(3 * second), Some(Wake::GiveUp));
        let state = State { last_look: Some(begin), ..State::default() };
        assert_eq!(state.next_look(begin + second / 2, begin), second / 2);
        assert_eq!(state.next_look(deadline, begin + second / 4), second * 3 / 4);
    }
}
