//! Storages of the tests that are none of the simulator's. [`SimDisk::wrapping`] gives each of them
//! the simulator's type.
//!
//! [`SimDisk::wrapping`]: blockhouse_sim::SimDisk::wrapping

mod broken;
mod flawed;
mod immediate;
pub mod log_words;
mod lying;
mod memory;

pub use broken::{Broken, Policy};
pub use flawed::{Flaw, FlawedMemory, FlawedStorage};
pub use immediate::Immediate;
pub use lying::{Lie, Lying};
pub use memory::Memory;
