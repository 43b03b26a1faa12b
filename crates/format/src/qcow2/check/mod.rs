//! Checks, repairs and creates images that are not open.
//!
//! This module reads and writes the tables in a storage, and does not use the in-memory state of an
//! open image. Opening an image calls two functions of this module: one detects a truncated file,
//! the other counts the references to each cluster.

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
