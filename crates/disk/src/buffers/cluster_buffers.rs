//! Memory for whole clusters: for decompression, for the padding of copy on write, and for copies
//! from a backing file into the image.
//!
//! The memory of all buffers is bounded, without a deadlock. Decompression waits only for I/O. Copy
//! on write may wait for decompression and for the backing file, but neither of them waits for copy
//! on write. A copy from a backing file may also wait for decompression and for the backing file.
//! Such a copy needs no copy on write, because it writes whole clusters.

use std::ops::{Deref, DerefMut};

use async_lock::{Semaphore, SemaphoreGuard};
use blockhouse_core::{Buffer, BufferPool, Result};

/// Maximum bytes of memory for each kind of use, unless [`MIN_BUFFERS`] large clusters need more.
const MAX_BYTES: u64 = 64 << 20;

/// Minimum number of buffers of each kind for any cluster size, and the maximum.
const MIN_BUFFERS: u64 = 8;
const MAX_BUFFERS: u64 = 256;

/// Bytes that are copied from a backing file at once, or one cluster if a cluster is larger.
pub(crate) const MAX_POPULATED: u64 = 1 << 20;

/// Bytes of memory that are kept for later use.
const POOL_BYTES: usize = 8 << 20;

/// The cluster buffers of a disk.
pub(crate) struct ClusterBuffers {
    pool: BufferPool,
    cow_permits: Semaphore,
    decompress_permits: Semaphore,
    populate_permits: Semaphore,
}

/// Memory for a cluster's bytes, returned to the pool when dropped.
pub(crate) struct ClusterBuffer<'a> {
    buffer: Buffer,
    _permit: SemaphoreGuard<'a>,
}

/// Memory for a cluster's compressed bytes and for the cluster.
pub(crate) struct DecompressBuffers<'a> {
    pub(crate) compressed: Buffer,
    pub(crate) cluster: Buffer,
    _permit: SemaphoreGuard<'a>,
}

impl ClusterBuffers {
    /// Buffers for clusters of this many bytes. A copy on write takes less than two clusters (head
    /// and tail), a decompression about three.
    pub(crate) fn new(cluster_size: u64) -> Self {
        let permits = |each: u64| (MAX_BYTES / each).clamp(MIN_BUFFERS, MAX_BUFFERS) as usize;
        Self {
            pool: BufferPool::new(POOL_BYTES),
            cow_permits: Semaphore::new(permits(2 * cluster_size)),
            decompress_permits: Semaphore::new(permits(3 * cluster_size)),
            populate_permits: Semaphore::new(permits(cluster_size.max(MAX_POPULATED))),
        }
    }

    /// `length` bytes with any content, for a copy on write or for a compressed cluster that is
    /// written.
    ///
    /// # Errors
    /// ENOMEM if memory runs out.
    pub(crate) async fn for_cow(&self, length: usize) -> Result<ClusterBuffer<'_>> {
        let permit = self.cow_permits.acquire().await;
        Ok(ClusterBuffer { buffer: self.pool.get(length)?, _permit: permit })
    }

    /// `length` bytes with any content, for clusters that are copied from a backing file: at most
    /// the larger of a cluster and [`MAX_POPULATED`].
    ///
    /// # Errors
    /// ENOMEM if memory runs out.
    pub(crate) async fn for_populating(&self, length: usize) -> Result<ClusterBuffer<'_>> {
        let permit = self.populate_permits.acquire().await;
        Ok(ClusterBuffer { buffer: self.pool.get(length)?, _permit: permit })
    }

    /// Memory to decompress `compressed` bytes to `cluster` bytes, with any content.
    ///
    /// # Errors
    /// ENOMEM if memory runs out.
    pub(crate) async fn for_decompression(
        &self,
        compressed: usize,
        cluster: usize,
    ) -> Result<DecompressBuffers<'_>> {
        let permit = self.decompress_permits.acquire().await;
        let (compressed, cluster) = (self.pool.get(compressed)?, self.pool.get(cluster)?);
        Ok(DecompressBuffers { compressed, cluster, _permit: permit })
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
