//! Memory for requests that are not aligned as the storage demands.
//!
//! A request holds one bounce buffer at a time. So a request that waits for a buffer waits only for
//! I/O, and no two requests wait for each other. At the limit, requests wait and do not fail.

use std::ops::{Deref, DerefMut};

use async_lock::{Semaphore, SemaphoreGuard};
use blockhouse_core::{Buffer, BufferPool, Result};

/// The largest bounce buffer in bytes; longer requests are carried out chunk by chunk. A multiple
/// of every alignment.
pub(crate) const CHUNK_SIZE: usize = 256 << 10;

/// Maximum number of bounce buffers in use: 64 MiB in all.
const MAX_BUFFERS: usize = 256;

/// Bytes of memory that are kept for later requests.
const POOL_BYTES: usize = 4 << 20;

/// The bounce buffers of a disk.
pub(crate) struct BounceBuffers {
    pool: BufferPool,
    permits: Semaphore,
}

/// A bounce buffer, returned to the pool when dropped.
pub(crate) struct Bounce<'a> {
    buffer: Buffer,
    _permit: SemaphoreGuard<'a>,
}

impl BounceBuffers {
    pub(crate) fn new() -> Self {
        Self { pool: BufferPool::new(POOL_BYTES), permits: Semaphore::new(MAX_BUFFERS) }
    }

    /// A buffer of `length` bytes (at most [`CHUNK_SIZE`]) with any content.
    ///
    /// # Errors
    /// ENOMEM if memory runs out.
    pub(crate) async fn get(&self, length: usize) -> Result<Bounce<'_>> {
        debug_assert!(length <= CHUNK_SIZE, "a bounce buffer of {length} bytes");
        let permit = self.permits.acquire().await;
        Ok(Bounce { buffer: self.pool.get(length)?, _permit: permit })
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
