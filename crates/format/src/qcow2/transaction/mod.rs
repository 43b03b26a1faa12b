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

use crate::qcow2::mapping::{Mapper, Mapping};
use crate::qcow2::writeback::{Metadata, State};

pub use amend::Amendments;
pub(crate) use amend::amend;
pub(crate) use backing::set_backing;
pub use bitmaps::{BitmapAction, BitmapChange, NewBitmap, NextChange};
pub(crate) use bitmaps::{
    add_bitmap, bitmap_extents, change_bitmap, change_bitmaps, list_bitmaps, merge_bitmap,
};
pub use inherited_bitmaps::InheritedBits;
pub(crate) use inherited_bitmaps::inherit_bitmaps;
pub(crate) use metadata_transaction::{Transactions, check_no_data_file};
pub(crate) use prepared_change::prepare_change;
pub use prepared_change::{Preparation, PreparedChange, SnapshotPlan};
pub(crate) use recount::recount;
pub(crate) use replay::{logged_hosts, replay};
pub(crate) use resize::{check_resize, grow, make_empty, prepare_resize, shrink};
pub use snapshots::NewSnapshot;
pub(crate) use snapshots::{
    apply_snapshot, create_snapshot, delete_snapshot, list_snapshots, rename_snapshot,
    show_snapshot,
};
pub use vm_state::{VmStateCluster, VmStateTables};
pub(crate) use vm_state::{allocate_clusters, location_of as vm_state_location};

/// The metadata of an open image, with the changes that its mapping prepares.
pub(crate) type ImageMetadata<S> = Metadata<S, Mapping>;

/// The state that a step of the mapping works on.
pub(crate) fn mapper(state: &mut State<Mapping>) -> Mapper<'_> {
    state.changes.mapper(&mut state.tables, &mut state.allocator)
}

/// As [`mapper`], blocked while the tables are frozen.
pub(crate) fn thawed_mapper(state: &mut State<Mapping>) -> crate::qcow2::tables::Step<Mapper<'_>> {
    state.tables.freeze_mut().wait_thawed()?;
    Ok(mapper(state))
}
