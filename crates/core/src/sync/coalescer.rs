//! Flushes that callers share: one runs, the others wait for it or are covered by it.
//!
//! A flush covers everything that completed before it began. So of many callers that need a flush
//! at the same time, one runs it. Callers whose work that flush covers return when it has
//! succeeded. Of the callers that came too late for it, one runs the next flush, for all that wait
//! by then.
//!
//! The meaning of "covered" is the caller's: `P` is the progress so far (a generation, a version,
//! or one of these for each kind of flush), and each caller passes a predicate on it. [`Coalescer`]
//! guarantees that at most one flush runs at a time, that only flushes that succeeded change the
//! progress, and that after a flush whose future is dropped the next one can run.

use super::Condvar;
use super::parts::{EventListener, Mutex};

/// Decides which caller runs a flush and which ones wait for it.
#[derive(Debug, Default)]
pub struct Coalescer<P> {
    state: Mutex<State<P>>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State<P> {
    is_running: bool,
    progress: P,
}

/// The next step of a caller.
#[derive(Debug)]
pub enum Turn<'a, P> {
    /// Nothing: a completed flush covers the caller.
    Covered,
    /// Wait for the running flush, then call again.
    Wait(EventListener),
    /// Run a flush. No other flush begins while the guard exists.
    Run(RunGuard<'a, P>),
}

/// The one flush that runs. If the guard is dropped without [`complete`](Self::complete), the flush
/// covers no caller.
#[derive(Debug)]
pub struct RunGuard<'a, P>(&'a Coalescer<P>);

impl<P> Coalescer<P> {
    /// No flush runs, and `progress` is the state already covered.
    pub fn new(progress: P) -> Self {
        Self { state: Mutex::new(State { is_running: false, progress }), ended: Condvar::new() }
    }

    /// The next step of a caller that needs `is_covered` to hold. Call this again after each wait;
    /// first check for anything else that ends the wait, such as a remembered failure.
    pub fn turn(&self, is_covered: impl FnOnce(&P) -> bool) -> Turn<'_, P> {
        let mut state = self.state.lock();
        if is_covered(&state.progress) {
            Turn::Covered
        } else if state.is_running {
            Turn::Wait(self.ended.listen())
        } else {
            state.is_running = true;
            drop(state);
            Turn::Run(RunGuard(self))
        }
    }

    /// Whether a flush runs at the moment.
    pub fn is_running(&self) -> bool {
        self.state.lock().is_running
    }
}

impl<P> RunGuard<'_, P> {
    /// Ends a flush that has succeeded: `note` records its progress before the other callers are
    /// woken.
    pub fn complete(self, note: impl FnOnce(&mut P)) {
        note(&mut self.0.state.lock().progress);
    }
}

impl<P> Drop for RunGuard<'_, P> {
    fn drop(&mut self) {
        self.0.state.lock().is_running = false;
        self.0.ended.notify_all();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    fn run<'a>(coalescer: &'a Coalescer<u64>, target: u64) -> RunGuard<'a, u64> {
        match coalescer.turn(|&progress| progress >= target) {
            Turn::Run(guard) => guard,
            other => panic!("{other:?}"),
        }
    }

    fn waits(coalescer: &Coalescer<u64>, target: u64) -> EventListener {
        match coalescer.turn(|&progress| progress >= target) {
            Turn::Wait(listener) => listener,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn those_who_come_during_a_flush_wait_and_are_covered_or_run_the_next() {
        let coalescer = Coalescer::new(0);
        let mut context = Context::from_waker(Waker::noop());
        let first = run(&coalescer, 1);
        let mut listener = pin!(waits(&coalescer, 1));
        assert!(listener.as_mut().poll(&mut context).is_pending() && coalescer.is_running());
        drop(waits(&coalescer, 2));
        first.complete(|progress| *progress = 1);
        assert!(listener.as_mut().poll(&mut context).is_ready() && !coalescer.is_running());
        assert!(matches!(coalescer.turn(|&progress| progress >= 1), Turn::Covered));
        drop(run(&coalescer, 2));
    }

    #[test]
    fn a_flush_that_fails_or_is_dropped_covers_nothing_and_lets_the_next_run() {
        let coalescer = Coalescer::new(0);
        let mut context = Context::from_waker(Waker::noop());
        let first = run(&coalescer, 1);
        let mut listener = pin!(waits(&coalescer, 1));
        drop(first);
        assert!(listener.as_mut().poll(&mut context).is_ready());
        drop(run(&coalescer, 1));
    }
}

/// Every interleaving of callers. Compiled in lab/models.
#[cfg(all(test, loom))]
mod loom_model {
    use std::sync::Arc;

    use loom::sync::atomic::{AtomicUsize, Ordering};
    use loom::thread;

    use super::{Coalescer, Turn};
    use crate::sync::loom_support::block_on;

    /// A disk: writes that have completed, and how many of them are stable.
    struct Disk {
        flushes: Coalescer<usize>,
        completed: AtomicUsize,
        stable: AtomicUsize,
        running: AtomicUsize,
    }

    impl Disk {
        fn write_and_flush(&self) {
            let target = self.completed.fetch_add(1, Ordering::AcqRel) + 1;
            loop {
                match self.flushes.turn(|&progress| progress >= target) {
                    Turn::Covered => break,
                    Turn::Wait(listener) => block_on(listener),
                    Turn::Run(guard) => {
                        assert_eq!(self.running.fetch_add(1, Ordering::AcqRel), 0, "two at a time");
                        let covered = self.completed.load(Ordering::Acquire);
                        self.stable.store(covered, Ordering::Relaxed);
                        self.running.fetch_sub(1, Ordering::AcqRel);
                        guard.complete(|progress| *progress = covered);
                    }
                }
            }
            assert!(self.stable.load(Ordering::Relaxed) >= target, "it is not stable");
        }
    }

    #[test]
    fn every_caller_returns_with_its_write_stable() {
        loom::model(|| {
            let disk = Arc::new(Disk {
                flushes: Coalescer::new(0),
                completed: AtomicUsize::new(0),
                stable: AtomicUsize::new(0),
                running: AtomicUsize::new(0),
            });
            let other = Arc::clone(&disk);
            let thread = thread::spawn(move || other.write_and_flush());
            disk.write_and_flush();
            thread.join().unwrap();
        });
    }
}
