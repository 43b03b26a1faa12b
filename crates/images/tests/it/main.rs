//! Images in files of the host. QEMU's tools make some of them, and look at what is left of others.
#![forbid(unsafe_code)]

mod qcow2_features;
mod qcow2_read;
mod qcow2_write;
mod qemu;
mod stored;
