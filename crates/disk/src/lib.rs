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
mod gate;
mod generations;
mod grace;
mod layers;
mod limits;
mod lock;
mod open;
mod path;
mod prepared;
mod snapshot;
mod stats;
mod tracker;
mod vmstate;
mod zero;

pub use blockhouse_format::BlockStatus;
pub use blockhouse_format::qcow2::{Backing, Compression, Snapshot};
pub use chain::{is_address, open, open_alone, open_snapshot};
pub use disk::{Access, Discard, Disk, FlushPolicy, Options};
pub use open::{CacheMode, ImageFormat, ImageOptions, Locking, create};
pub use snapshot::Pause;
pub use stats::Counters;
pub use vmstate::{Packing, VmStateReader, VmStateWriter};
