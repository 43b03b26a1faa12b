//! The engines against the kernel: each test runs on every engine that this host has.

mod common;
mod devices;
mod differential;
mod files;
mod fixed_files;
mod lifetimes;
mod loops;
mod registered_memory;
mod shared_file;
mod sockets;
mod stopping;
mod watches;
