//! Changes of an image as a whole: snapshots, the size of the disk, the backing file.
//!
//! The life cycle of a transaction on all metadata ([`MetadataTransaction`]):
//!
//! 1. One transaction runs at a time, and begins only while no change of guest data is in flight.
//! 2. Freeze: steps that change tables wait. A writeback writes everything dirty to the disk, and
//!    no other writeback runs. Reads continue.
//! 3. Build: new tables and refcounts (`shadow_refcounts`) are written to free clusters beside the
//!    active tables. An error or a crash here changes nothing.
//! 4. Commit: all new tables are flushed, then one write of the header's first sector makes the new
//!    tables active, on disk and in memory. After a crash either all old or all new tables are
//!    active, without a leak. If it is unknown whether the header write took effect, all changes
//!    fail until the image is opened again.
//! 5. Thaw. Freed clusters are returned to the host once the reads that may have looked them up
//!    have ended.
//!
//! A change of the size uses ordinary steps, in an order that is safe at every crash (`resize`);
//! the backing file changes with two writes of the header (`backing`), the version with one
//! (`amend`). Changes that a dead process had acknowledged are written to the disk before any other
//! change (`replay`), and lazy refcounts are recounted (`recount`).

mod amend;
mod backing;
mod bitmap_removal;
mod bitmaps;
mod data_file;
mod data_file_name;
mod freeze;
mod inherited_bitmaps;
mod metadata_transaction;
mod prepared_change;
mod recount;
mod replay;
mod resize;
mod shadow_refcounts;
mod shadow_slices;
mod snapshots;
mod vm_state;
mod zero_clusters;

pub use amend::Amendments;
pub use bitmaps::{BitmapAction, BitmapChange, Bitmaps, NewBitmap, NextChange};
pub use inherited_bitmaps::InheritedBits;
pub(crate) use metadata_transaction::Transactions;
pub use prepared_change::{Preparation, PreparedChange, SnapshotPlan};
pub(crate) use recount::recount;
pub use replay::ImageRedo;
pub(crate) use replay::logged_hosts;
pub use resize::Qcow2SizeChange;
pub(crate) use snapshots::show_snapshot;
pub use snapshots::{InternalSnapshots, NewSnapshot};
pub use vm_state::{VmStateCluster, VmStateTables, VmStates};
