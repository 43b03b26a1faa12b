//! The process that a simulation represents, and the step at which it ends.
//!
//! The steps of a process are the actions that others can see: a storage operation that starts or
//! ends, a store into memory that outlives the process. At the chosen step everything stops: that
//! step and all later ones do not happen. The future that is being polled still runs until its poll
//! returns. So a test must check that the process is alive before it uses the simulation's results.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The life of one process. Clones are the same process.
#[derive(Clone)]
pub(crate) struct Process(Arc<Life>);

struct Life {
    /// How many steps it has made.
    steps: AtomicU64,
    /// The first step that it does not make.
    last: AtomicU64,
}

impl Process {
    /// A process that lives until [`kill_at`](Self::kill_at) ends it.
    pub(crate) fn new() -> Self {
        Self(Arc::new(Life { steps: AtomicU64::new(0), last: AtomicU64::new(u64::MAX) }))
    }

    /// Makes a step; `false` when the process is dead, and the step does not happen.
    pub(crate) fn step(&self) -> bool {
        if self.is_dead() {
            return false;
        }
        self.0.steps.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// How many steps the process has made.
    pub(crate) fn steps(&self) -> u64 {
        self.0.steps.load(Ordering::Relaxed)
    }

    /// Makes the process die instead of making step number `step`, counted from 0, or at once if it
    /// has made that step.
    pub(crate) fn kill_at(&self, step: u64) {
        self.0.last.store(step.max(self.steps()), Ordering::Relaxed);
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.steps() >= self.0.last.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chosen_step_and_all_later_ones_do_not_happen() {
        let process = Process::new();
        process.kill_at(2);
        let made: Vec<_> = (0..4).map(|_| process.step()).collect();
        assert_eq!(made, [true, true, false, false]);
        assert!(process.is_dead() && process.steps() == 2);
    }

    #[test]
    fn a_step_that_is_over_kills_at_once() {
        let process = Process::new();
        assert!(process.step() && process.step());
        process.kill_at(0);
        assert!(process.is_dead() && !process.step());
    }
}
