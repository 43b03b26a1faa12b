//! The I/O path, floor 2 of the house: a [`Disk`] is an image format over a storage.
//!
//! Here is the one place where requests are checked, ordered where they must be, split by extent,
//! made durable and counted. Nothing here knows an engine or a protocol.
#![forbid(unsafe_code)]

mod block_status;
mod bounce;
mod chain;
mod clusters;
mod commit;
mod compare;
mod convert;
mod copy;
mod disk;
mod durable;
mod gate;
mod generations;
mod grace;
mod growth;
mod layers;
mod limits;
mod lock;
mod open;
mod packed;
mod path;
mod placement;
mod prepared;
mod publish;
mod rebase;
mod resize;
mod snapshot;
mod stats;
mod tracker;
mod transfer;
mod unpacked;
mod vmstate;
mod zero;

pub use block_status::{BlockStatus, BlockStatusCache};
pub use blockhouse_format::qcow2::{
    Backing, CheckReport, Compression, DataFile, Features, Snapshot,
};
pub use chain::{
    is_address, open, open_alone, open_snapshot, open_storage, open_tables, open_with_base,
};
pub use compare::{Comparing, first_status_difference};
pub use convert::{Before, CopyOptions, CopyProgress, Copying, Packing};
pub use disk::{Access, DetectZeroes, Discard, Disk, FlushPolicy, Options};
pub use lock::hold;
pub use open::{
    CacheMode, ImageFormat, ImageOptions, Locking, check_new_name, check_raw_backing, create,
};
pub use packed::Packed;
pub use placement::{Content, Placement};
pub use publish::{Existing, publish};
pub use snapshot::Pause;
pub use stats::Counters;
pub use vmstate::{StatePacking, VmStateReader, VmStateWriter};
