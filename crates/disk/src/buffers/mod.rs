//! Memory of a disk beyond that of its requests. All of it is bounded: beyond a limit requests wait.
//!
//! - [`BounceBuffers`]: for requests that are not aligned as the storage demands.
//! - [`ClusterBuffers`]: for decompression and copy on write.
//! - [`DecompressedCache`]: the clusters that were decompressed last.

mod bounce_buffers;
mod cluster_buffers;
mod decompressed_cache;

pub(crate) use bounce_buffers::{Bounce, BounceBuffers, CHUNK_SIZE};
pub(crate) use cluster_buffers::{ClusterBuffer, ClusterBuffers};
pub(crate) use decompressed_cache::{CompressedLocation, DecompressedCache};
