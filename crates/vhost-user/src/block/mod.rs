//! The block device that guests see (virtio 1.2, section 5.2): its requests, their limits, its
//! configuration.

pub(crate) mod config;
mod header;
mod limits;
mod request;
mod write_cache;

pub use header::{Command, SECTOR, Status};
pub use limits::{QUEUE_LIMITS, RequestLimits, SEG_MAX, SIZE_MAX};
pub use request::{BlockRequests, MAX_RANGES, MAX_SECTORS, RequestContext, SERIAL_BYTES, decode};
pub(crate) use write_cache::{DriverFlushes, WriteCacheMode};
