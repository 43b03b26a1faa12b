//! The NBD client against servers of others, and against servers that break the protocol
//! or lose what they have answered.
#![forbid(unsafe_code)]

mod hostile_server;
mod qemu_nbd;
mod server;
mod volatile_cache;
