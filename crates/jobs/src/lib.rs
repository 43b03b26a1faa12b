//! Jobs (layer 4): long work on disks that are used meanwhile.
//!
//! A [`Mirror`] copies a disk to another one while its guest goes on, until both are equal; then
//! the guest goes on with the copy, or the disk is held for another host. [`Mirror::commit`] copies
//! an overlay into its backing file, with which the guest goes on. A [`JobControl`] is what others
//! have of a running job: how far it is, and what they want of it. A job is one future, on any
//! executor: a [`Clock`](blockhouse_engine::Clock) is all that it needs beside the disks.
//!
//! A [`Stream`] fills an overlay from its backing file, and detaches it.
//!
//! A [`FrozenDisk`] is a disk as it was at one moment, beside the disk that goes on: what backups
//! read.
//!
//! From the bottom up, each uses only what is above it in this list:
//!
//! - `control`: what is wanted of a job, and what it tells
//! - `next_event`: what a job waits for
//! - `meter`: how a copy gets on
//! - `pace`: how fast it goes while a guest uses the disk
//! - `tracker`: what the guest changes meanwhile
//! - `copier`: copies what is dirty, for as long as the job goes on
//! - `mirror`: the steps of a mirror, and its end
//! - `stream`: the steps of a stream (with `control`, `next_event`, `meter` and `pace`)
//! - `frozen`: disks as they were (alone)
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
