//! Memory of a disk in addition to the memory of its requests. All of it is bounded: at a limit,
//! requests wait.
//!
//! - [`BounceBuffers`]: for requests that are not aligned as the storage demands.
//! - [`ClusterBuffers`]: for decompression, copy on write, and copies from backing files.
//! - [`DecompressedCache`]: the clusters that were decompressed last.

mod bounce_buffers;
mod cluster_buffers;
mod decompressed_cache;

pub(crate) use bounce_buffers::{Bounce, BounceBuffers, CHUNK_SIZE};
pub(crate) use cluster_buffers::{ClusterBuffer, ClusterBuffers, MAX_POPULATED};
pub(crate) use decompressed_cache::{CompressedLocation, DecompressedCache};
