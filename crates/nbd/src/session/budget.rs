//! How many bytes all connections of a server may have in flight together.
//!
//! Each request draws what it occupies, and waits while there is less, or while its connection would
//! hold more than is left for all others (dynamic thresholds, as in the shared buffers of switches). That
//! shares by need, but not with those that come after many who hold on to what they have: for them each
//! connection has a part that it need not draw (`reserved` in `flow`). A connection that has nothing in flight
//! does not wait: it overdraws for one request. Never more is drawn than the budget and one request a
//! connection.

use std::sync::atomic::{AtomicUsize, Ordering};

use event_listener::{Event, EventListener};

/// What connections draw from, on any thread.
pub struct Budget {
    drawn: AtomicUsize,
    most: usize,
    returned: Event,
}

impl Budget {
    /// Of `most` bytes.
    pub fn new(most: usize) -> Self {
        Self { drawn: AtomicUsize::new(0), most, returned: Event::new() }
    }

    /// Draws bytes for a connection that holds `held` already, if that leaves its share to others; says
    /// whether. No bytes are always there.
    pub fn try_draw(&self, bytes: usize, held: usize) -> bool {
        if bytes == 0 {
            return true;
        }
        let drawn = |drawn: usize| {
            let left = self.most.saturating_sub(drawn);
            (held.checked_add(bytes)? <= left).then_some(drawn + bytes)
        };
        self.drawn.fetch_update(Ordering::SeqCst, Ordering::SeqCst, drawn).is_ok()
    }

    /// Draws bytes whether there are so many or not.
    pub fn overdraw(&self, bytes: usize) {
        self.drawn.fetch_add(bytes, Ordering::SeqCst);
    }

    /// Gives bytes back that were drawn.
    pub fn give_back(&self, bytes: usize) {
        if bytes > 0 {
            self.drawn.fetch_sub(bytes, Ordering::SeqCst);
            self.returned.notify(usize::MAX);
        }
    }

    /// Resolves when bytes are given back after this call.
    pub fn returned(&self) -> EventListener {
        self.returned.listen()
    }
}
