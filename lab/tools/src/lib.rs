//! The shared parts of this workspace's programs that cargo starts and that start others.
//!
//! - [`process`]: starting other programs
//! - [`workspace`]: where the workspace and its build products are
//! - [`build`]: the binary under test
//! - [`apt`]: packages of the system
//! - `backports`: newer packages than the system's own
//! - [`qemu_driver`]: a QEMU driver that is a module
//! - [`block_device`]: the disk below a folder
//! - [`control`], [`monitor`]: a server's control socket, and QEMU's
//! - [`workers`]: parallel work
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "a task talks to the person who started it")]

pub mod apt;
mod backports;
pub mod block_device;
pub mod build;
pub mod control;
pub mod monitor;
pub mod process;
pub mod qemu_driver;
pub mod workers;
pub mod workspace;
