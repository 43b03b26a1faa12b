//! Disk image formats as mappings from guest ranges to host extents, floor 1 of the house.
//!
//! A [`Format`] says where a guest's bytes are and prepares the places that new ones go to. It never
//! moves guest data: that is the I/O path's work, one floor up.
#![forbid(unsafe_code)]

mod format;
mod interface;
mod preallocate;
pub mod probe;
pub mod qcow2;
mod raw;

pub use format::Format;
pub use interface::{Abort, Intent, MetadataSync};
pub use preallocate::{SpaceMode, preallocate};
pub use qcow2::Qcow2;
pub use raw::Raw;
