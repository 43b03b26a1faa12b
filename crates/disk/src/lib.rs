//! The I/O path: a disk is a format over storages.
#![forbid(unsafe_code)]
