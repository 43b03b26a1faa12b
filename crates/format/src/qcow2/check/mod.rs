//! Checks, repairs and creates images that are not open.
//!
//! This module reads and writes tables on a storage, as the format defines them, and does not use
//! the memory of an open image. Opening an image calls two of its functions: one finds the loss in
//! a truncated file, the other counts the references to each cluster.

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
