//! The commands and the shared memory of ublk, the kernel's driver for block devices in user space
//! (`<linux/ublk_cmd.h>`, Documentation/block/ublk.rst in Linux).
//!
//! - [`UblkControl`] adds, starts, stops and deletes devices, by commands to `/dev/ublk-control`.
//! - [`UblkDevice`] is `/dev/ublkcN`: it fetches and completes requests, by commands in the ring
//!   that also does the loop's file I/O. So one system call fetches requests, does their I/O, and
//!   completes them.
//! - [`UblkInfo`] and [`UblkCommand`] are the structures that the driver reads and writes.
//! - [`UblkPages`] reaches the data of requests in the kernel's own pages.
//!
//! Guarantees: the driver gets only memory that a command owns, or borrows until it has completed,
//! and no more of it than the driver knows of. A device whose driver would use memory in another
//! way is refused when it is opened. The callers interpret requests, and order the commands.

mod control;
mod device;
mod pages;
mod wire;

pub use control::UblkControl;
pub use device::{UblkData, UblkDevice};
pub use pages::UblkPages;
pub use wire::{UblkCommand, UblkDescriptor, UblkInfo, ublk_flag, ublk_state};
