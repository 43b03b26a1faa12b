//! The disk over simulated storages, against models, crashes and QEMU's tools.
#![forbid(unsafe_code)]

mod allocations;
mod bitmaps;
mod commit_crash;
mod common;
mod convert;
mod crash;
mod crashed;
mod detect_zeroes;
mod durability;
mod flush;
mod metrics;
mod model;
mod packed;
mod qcow2_crash;
mod qcow2_discard;
mod qcow2_durability;
mod qcow2_features;
mod qcow2_full;
mod qcow2_given_up;
mod qcow2_model;
mod qcow2_planted;
mod qcow2_read;
mod qcow2_resize_crash;
mod qcow2_table_moves;
mod qcow2_write;
mod qemu;
mod requests;
mod restarts;
mod snapshot;
mod subclusters;
mod threads;
mod throttle;
mod unaligned;
mod unpacked;
mod vmstate;
