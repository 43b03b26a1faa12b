//! Changes of an image as a whole: snapshots, the size of the disk, the backing file.
//!
//! The life of a transaction on all metadata ([`MetadataTransaction`]):
//!
//! 1. One transaction runs at a time, and begins only where no change of the guest's is in flight.
//! 2. Freeze: steps that change tables wait. A writeback brings all that is dirty to the disk, and
//!    no other one runs. Reads go on.
//! 3. Build: new tables are written to free clusters beside the active ones, refcounts too
//!    (`shadow_refcounts`). An error or a crash here changes nothing.
//! 4. Commit: all of it is flushed, then one write of the header's first sector makes the new
//!    tables the active ones, on disk and in memory. A crash finds all of the old or all of the
//!    new, without a leak. Where it is unknown whether that write took effect, nothing is changed
//!    while the image is open.
//! 5. Thaw; what is free now is given back to the host when the reads that may have looked it up
//!    have ended.
//!
//! A change of the size goes by ordinary steps, in an order that no crash makes wrong (`resize`);
//! the backing file changes with two writes of the header (`backing`), the version with one
//! (`amend`). What a process that has died had answered is brought to the disk before anything else
//! (`replay`), and refcounts that were written late are counted anew (`recount`).

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
