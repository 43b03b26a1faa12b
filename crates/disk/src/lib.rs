//! Disks (layer 2): open images, and read and write them. A [`Disk`] is an image format over a storage.
//!
//! [`open()`] opens a raw or qcow2 image with its backing files, and locks them; [`create()`] makes a new one.
//! [`Disk::submit`] carries out one request. It is the only place where requests are checked, ordered where they
//! must be, split by extent, made durable and counted, whichever export they come from. Nothing here knows an
//! engine or a protocol.
//!
//! ```
//! use blockhouse_core::{Buffer, Durability, Request};
//! use blockhouse_disk::{ImageFormat, ImageOptions, create, open};
//! use blockhouse_engine::{EngineChoice, EventLoop};
//!
//! # let folder = tempfile::tempdir().unwrap();
//! # let path = folder.path().join("disk.qcow2");
//! let mut event_loop = EventLoop::new(EngineChoice::Auto).unwrap();
//! event_loop.block_on(async {
//!     create(&path, 1 << 30, ImageFormat::Qcow2).await?;
//!     let disk = open(&path, ImageOptions::default()).await?;
//!
//!     // Offsets and lengths need no alignment. When this completes, the bytes are on stable storage.
//!     let mut buffer = Buffer::try_new(100)?;
//!     buffer.bytes_mut().fill(7);
//!     let write = Request::Write { offset: 1000, from: buffer.lend(), durability: Durability::Data };
//!     disk.submit(write).await?;
//!
//!     buffer.bytes_mut().fill(0);
//!     disk.submit(Request::Read { offset: 1000, into: buffer.lend() }).await?;
//!     assert_eq!(buffer.bytes(), [7; 100]);
//!     disk.close().await
//! })?;
//! # Ok::<(), blockhouse_core::Error>(())
//! ```
//!
//! A storage of your own becomes a disk by [`Disk::raw`] or [`Disk::open`]. Tools of `qemu-img` are here as well:
//! [`Copying`], [`Comparing`], snapshots, resize, commit, rebase and VM state.
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
mod durability;
mod gate;
mod growth;
mod layers;
mod limits;
mod lock;
mod open;
mod options;
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
pub use blockhouse_format::{
    Backing, CheckReport, Compression, DataFile, Features, ImageFormat, Snapshot,
};
pub use chain::{
    is_address, open, open_alone, open_snapshot, open_storage, open_tables, open_with_base,
};
pub use compare::{Comparing, first_status_difference};
pub use convert::{Before, CopyOptions, CopyProgress, Copying, Packing};
pub use disk::Disk;
pub use lock::hold;
pub use open::{CacheMode, ImageOptions, Locking, check_new_name, check_raw_backing, create};
pub use options::{Access, DetectZeroes, Discard, FlushPolicy, Options};
pub use packed::Packed;
pub use placement::{Content, Placement};
pub use publish::{Existing, publish};
pub use snapshot::Pause;
pub use stats::Counters;
pub use vmstate::{StatePacking, VmStateReader, VmStateWriter};
