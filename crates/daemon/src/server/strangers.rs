//! Readers of messages that an attacker in one process may send to others; only for fuzz targets.

pub use crate::hand_over::destination::read_offer;
pub use crate::launcher::{read_mounts, serve_stranger};

/// Parses QMP messages from bytes in pieces: each is a value, or the reason why it is invalid.
pub fn read_qmp<'a>(
    pieces: impl Iterator<Item = &'a [u8]>,
) -> Vec<Result<serde_json::Value, String>> {
    crate::qmp::read_all(pieces)
}
