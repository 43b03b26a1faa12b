//! How many bytes all connections of a server may have in flight together.
//!
//! Each request acquires the bytes that it occupies. The request waits while its connection, with
//! this request, would hold more bytes than are left (dynamic thresholds, as in the shared buffers
//! of network switches). Such shares adapt to demand, but a new connection would get little while
//! many others hold their shares. So each connection also has a reserved part outside of this limit
//! (`in_flight`). A connection that has nothing in flight never waits; it may exceed the limit by
//! one request. So the bytes in flight are at most the limit plus one request for each connection.

use std::sync::atomic::{AtomicU64, Ordering};

use event_listener::{Event, EventListener};

/// Bytes that the connections of a server share, on any thread.
pub struct ByteLimit {
    acquired: AtomicU64,
    limit: u64,
    released: Event,
}

impl ByteLimit {
    /// A limit of this many bytes.
    pub fn new(limit: u64) -> Self {
        Self { acquired: AtomicU64::new(0), limit, released: Event::new() }
    }

    /// Acquires `bytes` for a connection that already holds `held`, if at least `held + bytes` are
    /// left. Returns whether the bytes were acquired. Zero bytes are always granted.
    pub fn try_acquire(&self, bytes: u64, held: u64) -> bool {
        if bytes == 0 {
            return true;
        }
        let acquire = |acquired: u64| {
            let left = self.limit.saturating_sub(acquired);
            (held.checked_add(bytes)? <= left).then_some(acquired + bytes)
        };
        self.acquired.try_update(Ordering::SeqCst, Ordering::SeqCst, acquire).is_ok()
    }

    /// Acquires `bytes`, even if fewer are left.
    pub fn acquire_over_limit(&self, bytes: u64) {
        self.acquired.fetch_add(bytes, Ordering::SeqCst);
    }

    /// Returns bytes that were acquired.
    pub fn release(&self, bytes: u64) {
        if bytes > 0 {
            self.acquired.fetch_sub(bytes, Ordering::SeqCst);
            self.released.notify(usize::MAX);
        }
    }

    /// Resolves when bytes are released after this call.
    pub fn released(&self) -> EventListener {
        self.released.listen()
    }
}
