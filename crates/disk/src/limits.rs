//! How much memory requests may take that cannot go down as they are.
//!
//! A piece of such a request holds one bounce buffer, never two, so whoever waits for one waits for
//! I/O only: no two requests wait for each other. Beyond the limit requests wait, they do not fail.

use std::ops::{Deref, DerefMut};

use async_lock::{Semaphore, SemaphoreGuard};
use blockhouse_core::{Buffer, BufferPool, Result};

/// The largest bounce buffer in bytes; longer requests are carried out piece by piece. A multiple
/// of every alignment.
pub(crate) const PIECE: usize = 256 << 10;

/// How many are in use at once: 64 MiB in all.
const BUFFERS: usize = 256;

/// How much memory is kept for the next requests, in bytes.
const KEPT: usize = 4 << 20;

/// The bounce buffers of a disk.
pub(crate) struct BounceBuffers {
    pool: BufferPool,
    places: Semaphore,
}

/// A bounce buffer, given back when dropped.
pub(crate) struct Bounce<'a> {
    buffer: Buffer,
    _place: SemaphoreGuard<'a>,
}

impl BounceBuffers {
    pub(crate) fn new() -> Self {
        Self { pool: BufferPool::new(KEPT), places: Semaphore::new(BUFFERS) }
    }

    /// A buffer of `length` bytes (at most [`PIECE`]) with any content.
    ///
    /// # Errors
    /// ENOMEM where memory runs out.
    pub(crate) async fn get(&self, length: usize) -> Result<Bounce<'_>> {
        debug_assert!(length <= PIECE, "a bounce buffer of {length} bytes");
        let place = self.places.acquire().await;
        Ok(Bounce { buffer: self.pool.get(length)?, _place: place })
    }
}

impl Deref for Bounce<'_> {
    type Target = Buffer;

    fn deref(&self) -> &Buffer {
        &self.buffer
    }
}

impl DerefMut for Bounce<'_> {
    fn deref_mut(&mut self) -> &mut Buffer {
        &mut self.buffer
    }
}
