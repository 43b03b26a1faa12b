//! Jobs (layer 4): long operations on disks that stay in use.
//!
//! A [`Mirror`] copies a disk to another one while its guest runs, until both are equal. Then the
//! guest switches to the copy, or the disk refuses changes, because another host takes it over.
//! [`Mirror::commit`] copies an overlay into its backing file, and switches the guest to that file.
//! A [`JobControl`] reports the progress of a running job and passes requests to it. A job is one
//! future, on any executor. Beside the disks a job needs only a
//! [`Clock`](blockhouse_engine::Clock).
//!
//! A [`Stream`] fills an overlay from its backing file, and detaches the backing file.
//!
//! A [`FrozenDisk`] is the content of a disk at one moment, while the disk stays in use. Backups
//! read it.
//!
//! Modules from the bottom up; each uses only modules above it in this list:
//!
//! - `control`: requests to a job, and its reports
//! - `next_event`: the events that a job waits for
//! - `meter`: the progress of a copy
//! - `pace`: the rate of a copy while a guest uses the disk
//! - `retry`: the pauses before repeated attempts
//! - `tracker`: the guest's changes during a copy
//! - `copier`: copies dirty ranges until the job ends
//! - `mirror`: the steps of a mirror, and its end
//! - `stream`: the steps of a stream (uses `control`, `next_event`, `meter`, `pace` and `retry`)
//! - `frozen`: the content of disks at one moment (uses no other module)
#![forbid(unsafe_code)]

mod control;
mod copier;
mod frozen;
mod meter;
mod mirror;
mod next_event;
mod pace;
mod retry;
mod stream;
mod tracker;

pub use control::{Completion, JobControl, JobEnd, JobProgress, JobStage};
pub use frozen::{CopyTimer, FailureTeller, FreezeOptions, FrozenDisk, freeze};
pub use mirror::{CopyMode, Mirror, MirrorOptions};
pub use stream::Stream;
