//! Images that are not open: checked, repaired, created.
//!
//! Everything here reads and writes tables on a storage, as the format defines them; nothing uses
//! the memory of an open image. Opening an image uses two functions: they find the loss in a
//! truncated file, and count the references to each cluster.

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
