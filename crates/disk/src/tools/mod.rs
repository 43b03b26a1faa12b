//! Work on whole disks: copying, comparing, committing an overlay, rebasing it.
//!
//! [`scan`] finds what has to be read at all; [`chunks`] cuts one image into chunks by where they come from.

mod chunks;
mod commit_overlay;
mod compare;
mod convert;
mod rebase;
mod scan;
mod zeros;

pub use commit_overlay::commit_overlay;
pub use compare::{CompareJob, first_status_difference};
pub use convert::{CopyJob, CopyOptions, CopyProgress, TargetContent};
pub use rebase::{prepare_rebase, set_backing_file};
