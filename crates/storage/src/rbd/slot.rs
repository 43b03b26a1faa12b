//! The waiter of one operation.
//!
//! Guarantees: each operation ends once. If the future of a flush or durable write was dropped, its
//! failure is reported by the next flush.

use std::task::{Poll, Waker};

use blockhouse_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::detached::DetachedSyncs;

/// The progress of an operation.
pub(super) struct Slot {
    /// Whether the operation makes data durable.
    is_sync: bool,
    state: Mutex<State>,
}

enum State {
    InFlight(Option<Waker>),
    /// The future of the operation was dropped.
    Detached,
    /// The number of bytes, or the error.
    Ended(Result<u64>),
    /// The outcome was taken out.
    Over,
}

impl Slot {
    /// The state of an operation that is about to begin.
    pub(super) fn new(is_sync: bool) -> Self {
        Self { is_sync, state: Mutex::new(State::InFlight(None)) }
    }

    /// Records the end of the operation, and wakes its task.
    pub(super) fn complete(&self, outcome: Result<u64>, detached: &DetachedSyncs) {
        let mut state = self.state.lock();
        match std::mem::replace(&mut *state, State::Over) {
            State::InFlight(waker) => {
                *state = State::Ended(outcome);
                drop(state);
                waker.into_iter().for_each(Waker::wake);
            }
            State::Detached if self.is_sync => detached.complete(outcome.err()),
            State::Detached | State::Ended(_) | State::Over => {}
        }
    }

    /// Takes the outcome, or registers the task to wake when there is one.
    pub(super) fn poll(&self, waker: &Waker) -> Poll<Result<u64>> {
        let mut state = self.state.lock();
        match &mut *state {
            State::InFlight(Some(known)) => known.clone_from(waker),
            State::InFlight(none) => *none = Some(waker.clone()),
            State::Detached | State::Ended(_) | State::Over => {
                let over = || {
                    let what = "the outcome of an operation of Ceph was asked for twice";
                    Error::new(ErrorKind::Io, what)
                };
                return Poll::Ready(match std::mem::replace(&mut *state, State::Over) {
                    State::Ended(outcome) => outcome,
                    State::InFlight(_) | State::Detached | State::Over => Err(over()),
                });
            }
        }
        Poll::Pending
    }

    /// The future of the operation was dropped.
    pub(super) fn detach(&self, detached: &DetachedSyncs) {
        let mut state = self.state.lock();
        match &*state {
            State::InFlight(_) => {
                *state = State::Detached;
                if self.is_sync {
                    detached.detach();
                }
            }
            State::Ended(Err(error)) if self.is_sync => {
                detached.detach();
                detached.complete(Some(error.duplicate()));
            }
            State::Detached | State::Ended(_) | State::Over => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn failure() -> Result<u64> {
        Err(Error::new(ErrorKind::Io, "lost"))
    }

    #[test]
    fn an_outcome_is_taken_once_by_its_future() {
        let (slot, detached) = (Slot::new(true), DetachedSyncs::default());
        assert!(slot.poll(Waker::noop()).is_pending());
        slot.complete(Ok(7), &detached);
        assert!(matches!(slot.poll(Waker::noop()), Poll::Ready(Ok(7))));
        slot.detach(&detached);
        assert!(detached.drained().now_or_never().unwrap().is_ok());
    }

    #[test]
    fn the_failure_of_a_detached_sync_is_told_once_whenever_it_comes() {
        for ends_before in [false, true] {
            let (slot, detached) = (Slot::new(true), DetachedSyncs::default());
            if ends_before {
                slot.complete(failure(), &detached);
                slot.detach(&detached);
            } else {
                slot.detach(&detached);
                assert!(detached.drained().now_or_never().is_none(), "it is in flight");
                slot.complete(failure(), &detached);
            }
            assert!(detached.drained().now_or_never().unwrap().is_err());
            assert!(detached.drained().now_or_never().unwrap().is_ok());
        }
        let (plain, detached) = (Slot::new(false), DetachedSyncs::default());
        plain.detach(&detached);
        plain.complete(failure(), &detached);
        assert!(detached.drained().now_or_never().unwrap().is_ok());
    }
}
