//! Images on the host (layer 6): opens an image with its backing files and locks ([`open()`]),
//! makes new images ([`create()`]), and forks, clones and rolls back disks.
//!
//! The format of an image that may be written to is never probed from its content, because a guest
//! can write any bytes to the start of a raw disk. The caller states the format, or the file's name
//! decides. If the name decides, an image whose content contradicts that format is refused.
//!
//! The crate is compiled without optimization, as those above it are: it works only when an image
//! is opened or its files change, and uses the I/O path that `blockhouse-instances` has compiled.
//!
//! ```
//! use blockhouse_core::{Buffer, Durability, Request};
//! use blockhouse_disk::ImageFormat;
//! use blockhouse_engine::{EngineChoice, EventLoop};
//! use blockhouse_images::{ImageOptions, create, open};
//!
//! # let folder = tempfile::tempdir().unwrap();
//! # let path = folder.path().join("disk.qcow2");
//! let mut event_loop = EventLoop::new(EngineChoice::Auto).unwrap();
//! event_loop.block_on(async {
//!     create(&path, 1 << 30, ImageFormat::Qcow2).await?;
//!     let disk = open(&path, ImageOptions::default()).await?;
//!
//!     // Offsets and lengths need no alignment. When this completes, the bytes are stable.
//!     let mut buffer = Buffer::try_new(100)?;
//!     buffer.bytes_mut().fill(7);
//!     let (from, durability) = (buffer.lend(), Durability::Data);
//!     disk.submit(Request::Write { offset: 1000, from, durability }).await?;
//!
//!     buffer.bytes_mut().fill(0);
//!     disk.submit(Request::Read { offset: 1000, into: buffer.lend() }).await?;
//!     assert_eq!(buffer.bytes(), [7; 100]);
//!     disk.close().await
//! })?;
//! # Ok::<(), blockhouse_core::Error>(())
//! ```
#![forbid(unsafe_code)]

mod allowed_paths;
mod chain;
mod changed_since;
mod client_tls;
mod clone;
mod copy_target;
mod create;
mod disk_over;
mod durable_rename;
mod fork;
mod fork_bitmaps;
mod further_base;
mod handed_over;
mod image_options;
mod images_over;
mod key_slots;
mod layer_commit;
mod left_files;
mod left_layer;
mod left_out;
mod lock;
mod make_side_file;
mod moved_record;
mod open_image;
mod open_layers;
mod open_location;
mod partial_block;
mod probe_check;
mod qemu_name;
mod reader_locks;
mod reopen;
mod restore;
mod rollback;
mod same_bytes;
mod side_file;
mod start_recording;
mod tool_state;
mod unlock;
mod unwritten;
mod volume;
mod vouching;

// Links the optimized copies of the I/O path.
pub use allowed_paths::{AllowedPaths, note_data_file};
use blockhouse_instances as _;
pub use changed_since::changed_since;
pub use client_tls::{ClientTls, ClientTlsKind};
pub use clone::{CloneOf, MadeClone, clone_disks, is_in_ceph};
pub use copy_target::open_copy_target;
pub use create::{
    behind_links, check_new_name, create, create_as, create_qcow2, exists, format_for_new,
    is_device, keeps_its_place, open_created, part_of, remove_created, rename_finished,
};
pub use durable_rename::{IfExists, rename_durable};
pub use fork::{ForkOf, Forked, NewChild, fork, fork_image};
pub use further_base::{find_further_base, find_layers, note_passed_over};
pub use handed_over::{
    HandedFile, HandedOverDisk, SharedLayer, chain_files, first_files, keep_state,
};
pub use image_options::{
    BackingUse, CacheMode, FilePart, ImageOptions, Locking, Purpose, RemoteBacking, SideFile,
    StateUse,
};
pub use key_slots::{KeySlotChange, LastKey, change_key_slots};
pub use layer_commit::{begin_layer_commit, end_layer_commit};
pub use left_files::LeftFiles;
pub use lock::lock_for_writing;
pub use make_side_file::{make_missing_side_file, make_side_file, remove_unused_side_file};
pub use moved_record::{forget_moved, is_forked, record_committed, record_forked, record_moved};
pub use open_image::{CommitChain, open, open_base, open_storage};
pub use open_location::is_foreign_address;
pub use probe_check::{Probing, check_raw_backing, format_by_name, probe_nameless};
pub use qemu_name::{
    FLAGS_WITHOUT_EFFECT, NUMBERS_WITHOUT_EFFECT, QemuName, QemuTls, SpaceOptions,
    escape as escape_uri, is_address, plain_backing,
};
pub use reader_locks::ReaderLocksGuard;
pub use reopen::reopen;
pub use restore::{NOT_KEPT, PendingChanges, pending_changes, warn_of_state_elsewhere};
pub use rollback::{RolledBack, reads_layer_of, roll_back};
pub use same_bytes::{
    check_apart, check_apart_from, check_new_apart, check_new_apart_from, files_of_layer,
};
pub use start_recording::{lacks_side_file, start_recording, stop_recording};
pub use tool_state::{IfCorrupt, replay_state};
pub use unlock::{KeyFiles, Secrets};
pub use vouching::RENEWAL as VOUCHER_RENEWAL;
