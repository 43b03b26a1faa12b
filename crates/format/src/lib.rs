//! Disk image formats as mappings from guest ranges to host extents (layer 1).
//!
//! A [`Format`] finds the location of a guest's data, and prepares space for new data. It never
//! moves guest data: the I/O path of `blockhouse-disk` does. [`Qcow2`] is QEMU's format (design:
//! `qcow2/README.md`). Writes to [`Flat`] images change no mapping: [`Raw`] is the disk byte for
//! byte, with its bitmaps in a [`SideFile`]; [`Luks`] is a container whose disk the I/O path
//! decrypts; [`Foreign`] images have formats of other programs, and are only read
//! (`docs/formats.md`). [`NewForeign`] images are created from a disk.
//!
//! To use a disk, open it with `blockhouse-disk`. This crate alone is for creating images with all
//! their options, and for inspecting them:
//!
//! ```
//! use blockhouse_core::{ByteRange, ExtentState};
//! use blockhouse_format::Intent;
//! use blockhouse_format::qcow2::{CreateOptions, OpenOptions, Qcow2, create};
//! # use blockhouse_sim::{Config, Sim, SimDisk};
//! # let sim = Sim::new(1);
//! # let storage = SimDisk::new(&sim, Config::default(), Vec::new());
//!
//! # sim.block_on(async move {
//! create(&storage, &CreateOptions::new(1 << 30)).await?;
//! let image = Qcow2::open(storage, OpenOptions::default()).await?;
//! let extent = image.map(ByteRange::between(0, 65536), Intent::Read).await?;
//! assert_eq!(extent.state, ExtentState::Hole);
//! # Ok::<(), blockhouse_core::Error>(())
//! # })?;
//! # Ok::<(), blockhouse_core::Error>(())
//! ```
#![forbid(unsafe_code)]

mod aligned_read;
mod aligned_write;
mod bitmaps;
mod compressed;
mod describe;
mod encryption;
mod flat;
mod foreign;
mod format;
mod header;
mod image_format;
mod inflate;
mod interface;
mod luks;
mod open;
mod preallocate;
pub mod probe;
pub mod qcow2;
mod size_change;
mod snapshots;

pub use compressed::CompressedClusters;
pub use encryption::{DataPlace, Encryption};
pub use flat::{Flat, Raw, SideFile};
pub use foreign::{
    FilePiece, FilePieces, Foreign, ForeignKind, NewForeign, NewForeignOptions, NewParent,
    NewVmdkFile, Subformat, VmdkExtent, VmdkFacts, replay_vhdx_log, vmdk_descriptor, vmdk_files,
};
pub use format::Format;
pub use header::ImageHeader;
pub use image_format::ImageFormat;
pub use interface::{Abort, Access, CacheCounts, Discard, Intent, MetadataSync, Replay};
pub use luks::{
    Luks, LuksCipher, LuksDigest, LuksEncryption, LuksHash, LuksHeader, LuksKdf, LuksSlot,
    LuksSlotKey, NewLuks, NewLuksSlot, create as create_luks,
};
pub use open::{OpenOptions, create, initial_file_size};
pub use preallocate::{SpaceMode, preallocate};
pub use qcow2::{
    Amendments, Backing, Bitmap, BitmapAction, BitmapActivity, BitmapChange, BitmapExtent, Bitmaps,
    CheckReport, Compression, DataFile, Features, InheritedBits, NewBitmap, NewSnapshot,
    Preparation, PreparedChange, Qcow2, ReadGuard, Snapshot, SnapshotPlan, VmStateCluster,
    VmStateTables, VmStates, redo_log_len,
};
pub use size_change::SizeChange;
pub use snapshots::Snapshots;
