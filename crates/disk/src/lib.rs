//! Disks (layer 3): opens images, and reads and writes them. An [`Image`] is an image format over a
//! storage. A [`Disk`] has an image, and all requests to the image pass through the disk.
//!
//! [`open()`] opens a raw or qcow2 image with its backing files, and locks them; [`create()`] makes
//! a new one. [`Disk::submit`] carries out one request. It is the only place where requests are
//! checked, ordered if they must be, split by extent, made durable and counted, for all exports.
//! [`DiskStats::metrics`] returns the counts and durations of requests and operations. No code of
//! this crate depends on a particular engine or protocol.
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
//!
//! [`Disk::raw`] and [`Disk::open`] make a disk of your own storage. The crate also has operations
//! of `qemu-img`: [`CopyJob`], [`CompareJob`], snapshots, resize, commit, rebase and VM state.
//!
//! The modules from the bottom up; each uses only modules above it in this list:
//!
//! - `options`, `stats`, `buffers`, `claims`, `parts`: options, counters, bounded memory, the order
//!   of overlapping changes, requests in parts
//! - `observers`, `dirty_map`, `transient_bitmaps`, `read_probe`: the observers of changes, the
//!   changed parts of a disk, bitmaps in memory, probes for reads of another disk
//! - `throttle`: limits on rates
//! - `state`: memory that outlives the process
//! - `durability`: the durability decision, and the tracker of flushes around each storage
//! - `layer`: one image of a chain, and reads of it
//! - `write`: changes of one image
//! - `image`: one image, opened: layer, writer, options, state
//! - `disk`: the single path of all requests
//! - `snapshots`, `bitmaps`, `vm_state`, `tools`, `open`: operations on whole disks
#![forbid(unsafe_code)]

mod bitmaps;
mod buffers;
mod claims;
mod dirty_map;
mod disk;
mod durability;
mod image;
mod layer;
mod observers;
mod open;
mod options;
mod parts;
mod read_probe;
mod snapshots;
mod state;
mod stats;
mod throttle;
mod tools;
mod transient_bitmaps;
mod vm_state;
mod write;

pub use bitmaps::{BitmapChange, DiskBitmaps, change_bitmaps};
pub use blockhouse_format::qcow2::{BitmapLoss, CreateOptions, Switch, Version};
pub use blockhouse_format::{
    Amendments, Backing, Bitmap, BitmapAction, BitmapExtent, CacheCounts, CheckReport, Compression,
    DataFile, Features, ImageFormat, NewBitmap, Replay, Snapshot,
};
pub use dirty_map::DirtyMap;
pub use disk::{
    Disk, DiskJobs, DiskStats, EarlierCounts, FailedRequest, FailureObserver, FlushedAhead,
    FurtherBase, Hold, HoldChange, HoldObserver, PartyHold, PopulatingGuard, QuiescedDisk,
    ReplacedImage, flush_ahead, is_inactive, preferred_block_size,
};
pub use image::{Image, LayerInfo, takes_kernel_pages};
pub use layer::{BackingWait, BlockStatus, BlockStatusCache, MapEntry, MapEntryKind};
pub use observers::{ChangeId, ChangeObserver, ChangeWait, MAX_OBSERVED_BYTES};
pub use open::{
    AllowedPaths, BackingUse, CacheMode, ClientTls, ClientTlsKind, CloneOf, CommitChain,
    FLAGS_WITHOUT_EFFECT, FilePart, ForkOf, Forked, HandedFile, HandedOverDisk, IfCorrupt,
    IfExists, ImageDisk, ImageOptions, KeyFiles, KeySlotChange, LastKey, LeftFiles, Locking,
    MadeClone, NOT_KEPT, NUMBERS_WITHOUT_EFFECT, NewChild, PendingChanges, Probing, Purpose,
    QemuName, QemuTls, ReaderLocksGuard, RemoteBacking, RolledBack, Room, Secrets, SharedLayer,
    SideFile, SpaceOptions, StateUse, StoredImage, VOUCHER_RENEWAL, begin_layer_commit,
    behind_links, change_key_slots, changed_since, check_apart, check_apart_from, check_new_apart,
    check_new_apart_from, check_new_name, check_raw_backing, clone_disks, create, create_as,
    create_qcow2, end_layer_commit, escape_uri, exists, find_further_base, find_layers,
    forget_moved, fork, fork_image, format_by_name, format_for_new, is_address, is_device,
    is_foreign_address, is_forked, is_in_ceph, keep_state, keeps_its_place, lock_for_writing,
    make_missing_side_file, make_side_file, note_data_file, note_passed_over, open, open_base,
    open_copy_target, open_created, open_storage, part_of, plain_backing, probe_nameless,
    record_committed, record_forked, record_moved, remove_created, remove_unused_side_file,
    rename_durable, rename_finished, reopen, replay_state, roll_back, start_recording,
    stop_recording,
};
pub use options::{
    Access, BitmapActivity, BlockSizes, DetectZeroes, Discard, FlushPolicy, OnFull, Options,
};
pub use read_probe::ReadProbe;
pub use snapshots::{DiskSnapshots, Pause};
pub use state::StateDir;
pub use stats::{
    ClientGuard, ClientMetrics, Counters, DiskMetrics, ErrorCount, ExportKind, ExportLoad,
    HostOperation, Operation, RequestMetrics, RequestTimer, Stage, StageMetrics,
};
pub use throttle::{
    Burst, LiftGuard, MAX_RATE, RateLimits, Throttle, ThrottleGroup, ThrottleStats,
};
pub use tools::{
    AfterCommit, CompareJob, Compress, CopyJob, CopyOptions, CopyProgress, LayerCommit,
    LoadRequest, LoadSequence, MARK_BYTES, NewImage, RangeCopy, STREAM_PIECE, StreamOptions,
    TargetContent, amend, check_not_marked, commit_overlay, copy_stream, first_status_difference,
    mark_incomplete, prepare_rebase, rename_data_file, send_load, set_backing_file, take_space,
    warn_of_mark,
};
pub use vm_state::{VmStateReader, VmStateWriter};
pub use write::{BackedRange, CompressResult};
