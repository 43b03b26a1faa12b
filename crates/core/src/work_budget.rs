//! Long work in short steps: a task that computes lets the others of its thread run.
//!
//! Futures are not interrupted. Work that never waits (filling holes with zeros, looking up
//! extents, decompression) would keep every other task of the thread waiting until the whole
//! request is done. So such work counts what it does and yields after each quantum. It counts and
//! does not read a clock, because counting costs nothing and a simulation stays deterministic.

use std::cell::Cell;
use std::future::poll_fn;
use std::task::Poll;

/// Lets every other task that is ready run first. Works with any executor: the future wakes its
/// task, returns pending once, and is then ready.
pub async fn yield_now() {
    let mut yielded = false;
    poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// The rest of the quantum of one request. Starts full.
#[derive(Debug)]
pub struct WorkBudget {
    left: Cell<u64>,
}

impl WorkBudget {
    /// The work between two yields, in bytes of memory that are filled or copied: 10 to 30
    /// microseconds.
    pub const QUANTUM: u64 = 128 << 10;

    /// The cost of looking up an extent, in the same unit: a fraction of a microsecond.
    pub const LOOK_UP: u64 = 2 << 10;

    /// The cost of a decompressed byte, in copied bytes.
    pub const DECOMPRESSION: u64 = 16;

    /// A full quantum.
    pub fn new() -> Self {
        Self { left: Cell::new(Self::QUANTUM) }
    }

    /// Records work of this `cost`.
    pub fn charge(&self, cost: u64) {
        self.left.update(|left| left.saturating_sub(cost));
    }

    /// Yields and starts a new quantum if the present one is used up.
    pub async fn yield_if_spent(&self) {
        if self.left.get() == 0 {
            self.left.set(Self::QUANTUM);
            yield_now().await;
        }
    }

    /// Records work of this `cost`, and yields if the quantum is used up.
    pub async fn spend(&self, cost: u64) {
        self.charge(cost);
        self.yield_if_spent().await;
    }
}

impl Default for WorkBudget {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Wake, Waker};

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn each_quantum_of_work_is_one_yield() {
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&woken));
        let mut work = pin!(async {
            let budget = WorkBudget::new();
            for _ in 0..10 {
                budget.spend(WorkBudget::QUANTUM / 2).await;
            }
        });
        let mut polls = 1;
        while work.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
            assert_eq!(woken.0.load(Ordering::Relaxed), polls, "woken at once");
            polls += 1;
        }
        assert_eq!(polls, 1 + 5);
    }
}
