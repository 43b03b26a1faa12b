//! Whether a task is in the ready queue, or on its way there.
//!
//! Guarantee: after a wake-up a poll of the task begins that sees what the waking thread did
//! before. Most wake-ups find the task queued already and do not queue it again. Such a wake-up
//! relies on a poll that has not begun yet. So both sides change the flag by one atomic operation
//! that also reads it: one of the two comes first, and the other synchronizes with it.
//! `queued_flag::loom_model` checks this; with a plain load or store on either side it fails.

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, Ordering};

/// The flag of one task.
pub(crate) struct QueuedFlag(AtomicBool);

impl QueuedFlag {
    pub(crate) fn new(queued: bool) -> Self {
        Self(AtomicBool::new(queued))
    }

    /// Marks the task as queued. Returns true if it was not queued before: then the caller must
    /// queue it.
    pub(crate) fn set(&self) -> bool {
        !self.0.swap(true, Ordering::AcqRel)
    }

    /// Whether the task is queued.
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Clears the flag when a poll begins: later wake-ups queue the task for another poll.
    pub(crate) fn clear(&self) {
        self.0.swap(false, Ordering::AcqRel);
    }
}

/// Every order of a wake-up and a poll. Compiled in lab/models.
#[cfg(all(test, loom))]
mod loom_model {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicBool, Ordering};
    use loom::thread;

    use super::QueuedFlag;

    #[test]
    fn a_wake_up_that_finds_the_task_queued_is_seen_by_the_poll() {
        loom::model(|| {
            // Queued for another reason; the poll is about to begin.
            let queued = Arc::new(QueuedFlag::new(true));
            let happened = Arc::new(AtomicBool::new(false));
            let other = {
                let (queued, happened) = (Arc::clone(&queued), Arc::clone(&happened));
                thread::spawn(move || {
                    happened.store(true, Ordering::Relaxed);
                    queued.set()
                })
            };
            queued.clear();
            let seen = happened.load(Ordering::Relaxed);
            let queued_again = other.join().unwrap();
            assert!(seen || queued_again, "the wake-up is lost");
        });
    }
}
