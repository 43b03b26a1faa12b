//! Work on whole disks: copying, comparing, committing an overlay, rebasing it.
//!
//! [`scan`] finds the ranges that have to be read; [`chunks`] cuts one image into chunks by the
//! source of their data; [`range_writer`] writes the data.

mod amend;
mod chunks;
mod commit_overlay;
mod compare;
mod convert;
mod incomplete_mark;
mod layer_commit;
mod load;
mod new_image;
mod range_copy;
mod range_writer;
mod rebase;
mod scan;
mod stream_copy;
mod take_space;
mod zeros;

pub use amend::{amend, rename_data_file};
pub use commit_overlay::{AfterCommit, commit_overlay};
pub use compare::{CompareJob, first_status_difference};
pub use convert::{CopyJob, CopyOptions, CopyProgress, TargetContent};
pub use incomplete_mark::{MARK_BYTES, check_not_marked, mark_incomplete, warn_of_mark};
pub use layer_commit::LayerCommit;
pub use load::{LoadRequest, LoadSequence, send_load};
pub use new_image::NewImage;
pub use range_copy::RangeCopy;
pub use rebase::{Compress, prepare_rebase, set_backing_file};
pub use stream_copy::{STREAM_PIECE, StreamOptions, copy_stream};
pub use take_space::take_space;
