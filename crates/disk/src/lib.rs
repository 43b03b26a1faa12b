//! The I/O path, floor 2 of the house: a [`Disk`] is an image format over a storage.
//!
//! Here is the one place where requests are checked, ordered where they must be, split by extent,
//! made durable and counted. Nothing here knows an engine or a protocol.
#![forbid(unsafe_code)]

mod bounce;
mod chain;
mod clusters;
mod copy;
mod disk;
mod durable;
mod generations;
mod grace;
mod growth;
mod layers;
mod limits;
mod lock;
mod open;
mod path;
mod prepared;
mod stats;
mod tracker;
mod zero;

pub use blockhouse_format::BlockStatus;
pub use blockhouse_format::qcow2::Backing;
pub use chain::{is_address, open, open_alone};
pub use disk::{Access, Discard, Disk, FlushPolicy, Options};
pub use open::{CacheMode, ImageFormat, ImageOptions, Locking, create};
pub use stats::Counters;
