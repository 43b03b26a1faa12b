//! Disks and images over a user's path or URI: their files, sizes and space on the host.

mod allocated_space;
mod image_disk;
mod refresh_size;
mod room;

pub use image_disk::{ImageDisk, StoredImage};
pub use room::{HostSpace, Room};
