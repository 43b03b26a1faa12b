//! What a stranger who has taken a process over may send to the others: for the fuzz targets, and
//! for no other program.

pub use crate::hand_over::destination::read_offer;
pub use crate::launcher::{read_mounts, serve_stranger};
