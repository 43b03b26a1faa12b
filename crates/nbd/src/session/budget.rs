//! How many bytes all connections of a server may have in flight together.
//!
//! Each request draws what it occupies, and waits while there is less. A connection that has nothing in
//! flight does not wait: it overdraws for one request, so that nobody can keep others from being served
//! by holding on to what he drew. So never more is drawn than the budget and one request a connection.

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

    /// Draws bytes if there are so many; says whether.
    pub fn try_draw(&self, bytes: usize) -> bool {
        let drawn = |drawn: usize| drawn.checked_add(bytes).filter(|&sum| sum <= self.most);
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
