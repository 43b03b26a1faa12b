//! Disks (layer 3): reads and writes images, which the crate `images` opens. An [`Image`] is an
//! image format over a storage. A [`Disk`] has an image, and all requests to the image pass through
//! the disk.
//!
//! [`Disk::submit`] carries out one request. It is the only place where requests are checked,
//! ordered if they must be, split by extent, made durable and counted, for all exports.
//! [`DiskStats::metrics`] returns the counts and durations of requests and operations. No code of
//! this crate depends on a particular engine or protocol.
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
//! - `snapshots`, `bitmaps`, `vm_state`, `tools`: operations on whole disks
//! - `stored`: disks and images whose storage is a file, or a place on another server
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
mod options;
mod parts;
mod read_probe;
mod snapshots;
mod state;
mod stats;
mod stored;
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
    ReplacedImage, check_overlay_size, flush_ahead, is_inactive, preferred_block_size,
    quiesce_flushed,
};
pub use image::{EarlierWrites, Image, LayerInfo, takes_kernel_pages};
pub use layer::{
    BackingWait, BlockStatus, BlockStatusCache, DataEncryption, Layer, MapEntry, MapEntryKind,
};
pub use observers::{ChangeId, ChangeObserver, ChangeWait, MAX_OBSERVED_BYTES};
pub use options::{
    Access, BitmapActivity, BlockSizes, DetectZeroes, Discard, FlushPolicy, OnFull, Options,
};
pub use read_probe::ReadProbe;
pub use snapshots::{DiskSnapshots, Pause, create_together, delete_unneeded};
pub use state::{
    BootId, FlushRecord, FoundState, ImageIdentity, Owner, StateDir, StateFile, StatePage,
    TrackedFile, fnv, is_on_fuse,
};
pub use stats::{
    ClientGuard, ClientMetrics, Counters, DiskMetrics, ErrorCount, ExportKind, ExportLoad,
    HostOperation, Operation, RequestMetrics, RequestTimer, Stage, StageMetrics,
};
pub use stored::{HostSpace, ImageDisk, Room, StoredImage};
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
