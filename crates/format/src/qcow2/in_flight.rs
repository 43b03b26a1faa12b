//! Writes of tables that may still be under way although nobody waits for them any more.
//!
//! A round whose future is dropped leaves its writes to end by themselves. Another write of the same
//! table must not be overtaken by them, so the next round waits until they have.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use event_listener::Event;

/// Counts writes of tables. Clones count together.
#[derive(Clone, Default)]
pub(crate) struct InFlight(Arc<Count>);

#[derive(Default)]
struct Count {
    writes: AtomicUsize,
    ended: Event,
}

/// One write, as long as its memory is in use.
pub(crate) struct Underway(Arc<Count>);

impl InFlight {
    pub(crate) fn enter(&self) -> Underway {
        self.0.writes.fetch_add(1, Ordering::SeqCst);
        Underway(Arc::clone(&self.0))
    }

    /// Waits until no write is under way.
    pub(crate) async fn ended(&self) {
        while self.0.writes.load(Ordering::SeqCst) > 0 {
            let ended = self.0.ended.listen();
            if self.0.writes.load(Ordering::SeqCst) > 0 {
                ended.await;
            }
        }
    }
}

impl Drop for Underway {
    fn drop(&mut self) {
        if self.0.writes.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.ended.notify(usize::MAX);
        }
    }
}
