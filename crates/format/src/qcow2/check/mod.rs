//! Images that are not open: checked, repaired, created.
//!
//! Everything here reads and writes tables at a storage, as the format lays them out; nothing uses
//! what an open image has in memory. Opening an image uses two answers of it: what a file that was
//! cut off has lost, and how often each cluster is referred to.

mod bitmaps;
mod counts;
pub(crate) mod create;
pub(crate) mod disk_refcounts;
mod edit;
pub(crate) mod finding;
mod refcount_rewrite;
pub(crate) mod references;
pub(crate) mod repair;
mod repair_snapshots;
pub(crate) mod report;
mod snapshot_survey;
pub(crate) mod truncation;
