//! Jobs on simulated disks: one binary.
#![forbid(unsafe_code)]

mod guests;
mod late;
mod mirror;
mod racing;
mod scene;
