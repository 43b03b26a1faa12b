//! Memory for whole clusters: what is unpacked, and what is copied around a write.
//!
//! Both are bounded. Whoever unpacks waits for I/O only; whoever copies may wait for unpacking, and
//! for the disk behind this one, never the other way round: nobody waits in a circle.

use std::ops::{Deref, DerefMut};

use async_lock::{Semaphore, SemaphoreGuard};
use blockhouse_core::{Buffer, BufferPool, Result};

/// The memory of each of the two uses in bytes, where clusters are not larger than that allows.
const BUDGET: u64 = 64 << 20;

/// How many of each are possible at once whatever the cluster size, and how many at most.
const MIN_PERMITS: u64 = 8;
const MAX_PERMITS: u64 = 256;

/// How much memory is kept for the next ones, in bytes.
const KEPT: usize = 8 << 20;

/// The cluster buffers of a disk.
pub(crate) struct ClusterBuffers {
    pool: BufferPool,
    copies: Semaphore,
    unpacked: Semaphore,
}

/// Memory for a cluster's bytes, given back when dropped.
pub(crate) struct ClusterBuffer<'a> {
    buffer: Buffer,
    _place: SemaphoreGuard<'a>,
}

/// Memory for a cluster's packed bytes and for what becomes of them.
pub(crate) struct Unpacking<'a> {
    pub(crate) packed: Buffer,
    pub(crate) cluster: Buffer,
    _place: SemaphoreGuard<'a>,
}

impl ClusterBuffers {
    /// For clusters of so many bytes. A copy takes less than two of them (head and tail), a packed
    /// cluster and what it unpacks to about three.
    pub(crate) fn new(cluster_size: u64) -> Self {
        let places = |each: u64| (BUDGET / each).clamp(MIN_PERMITS, MAX_PERMITS) as usize;
        Self {
            pool: BufferPool::new(KEPT),
            copies: Semaphore::new(places(2 * cluster_size)),
            unpacked: Semaphore::new(places(3 * cluster_size)),
        }
    }

    /// `length` bytes with any content, for a copy.
    ///
    /// # Errors
    /// ENOMEM where memory runs out.
    pub(crate) async fn for_copy(&self, length: usize) -> Result<ClusterBuffer<'_>> {
        let place = self.copies.acquire().await;
        Ok(ClusterBuffer { buffer: self.pool.get(length)?, _place: place })
    }

    /// Memory to unpack `packed` bytes to `cluster` bytes, with any content.
    ///
    /// # Errors
    /// ENOMEM where memory runs out.
    pub(crate) async fn for_unpacking(
        &self,
        packed: usize,
        cluster: usize,
    ) -> Result<Unpacking<'_>> {
        let place = self.unpacked.acquire().await;
        let (packed, cluster) = (self.pool.get(packed)?, self.pool.get(cluster)?);
        Ok(Unpacking { packed, cluster, _place: place })
    }
}

impl Deref for ClusterBuffer<'_> {
    type Target = Buffer;

    fn deref(&self) -> &Buffer {
        &self.buffer
    }
}

impl DerefMut for ClusterBuffer<'_> {
    fn deref_mut(&mut self) -> &mut Buffer {
        &mut self.buffer
    }
}
