//! The formats against models, damaged images, crashes and QEMU's tools.
#![forbid(unsafe_code)]

mod common;
mod qcow2_bitmaps;
mod qcow2_corrupt_bit;
mod qcow2_crash;
mod qcow2_damage;
mod qcow2_data_file;
mod qcow2_header_changes;
mod qcow2_operations;
mod qcow2_rare_tables;
mod qcow2_read;
mod qcow2_repair;
mod qcow2_replay;
mod qcow2_snapshot;
mod qcow2_transactions;
mod qcow2_write;
mod raw;
mod vdi;
mod vhdx;
mod vmdk;
mod vpc;
