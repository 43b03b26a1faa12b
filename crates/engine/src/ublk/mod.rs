//! The kernel's driver of block devices in user space: its commands, and the memory that it shares
//! (ublk, `<linux/ublk_cmd.h>`, Documentation/block/ublk.rst in Linux).
//!
//! - [`UblkControl`] adds, starts, stops and deletes devices, by commands to `/dev/ublk-control`.
//! - [`UblkDevice`] is `/dev/ublkcN`: it takes requests and answers them, by commands in the ring
//!   of the loop that carries the files, too. So one system call fetches requests, does their I/O,
//!   and answers them.
//! - [`UblkInfo`] and [`UblkCommand`] are what the driver reads and writes, as values.
//!
//! Guarantees: the driver gets no memory but what a command owns, or borrows until it has
//! completed, and no more of it than the driver knows of. A device whose driver would use memory in
//! another way is refused when it is opened. What requests mean, and which commands follow which,
//! is decided by those who call.

mod control;
mod device;
mod wire;

pub use control::UblkControl;
pub use device::UblkDevice;
pub use wire::{UblkCommand, UblkDescriptor, UblkInfo, ublk_flag, ublk_state};
