//! Readers of messages that an attacker in one process may send to others; only for fuzz targets.

pub use crate::hand_over::destination::read_offer;
pub use crate::launcher::{read_mounts, serve_stranger};
