//! Work on whole disks: copying, comparing, committing an overlay, rebasing it.
//!
//! [`scan`] finds what has to be read at all; [`chunks`] cuts one image into chunks by where they come from.

mod amend;
mod chunks;
mod commit_overlay;
mod compare;
mod convert;
mod incomplete_mark;
mod range_copy;
mod rebase;
mod scan;
mod take_space;
mod tool_progress;
mod zeros;

pub use amend::amend;
pub use commit_overlay::{AfterCommit, commit_overlay};
pub use compare::{CompareJob, first_status_difference};
pub use convert::{CopyJob, CopyOptions, CopyProgress, TargetContent};
pub use incomplete_mark::{MARK_BYTES, check_not_marked, mark_incomplete};
pub use range_copy::RangeCopy;
pub use rebase::{prepare_rebase, set_backing_file};
pub use take_space::take_space;
pub use tool_progress::ToolProgress;
