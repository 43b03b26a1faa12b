//! The NBD client against servers of others, and against servers that break the protocol.
#![forbid(unsafe_code)]

mod hostile_server;
mod qemu_nbd;
mod server;
