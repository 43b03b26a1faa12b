//! Jobs on simulated disks: one binary.
#![forbid(unsafe_code)]

mod commit;
mod copies;
mod copy_on_read;
mod frozen;
mod frozen_planted;
mod guests;
mod late;
mod layer_commit;
mod mirror;
mod racing;
mod scene;
mod stream;
