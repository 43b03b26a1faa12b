//! The messages that an attacker in one process may send to the others: for the fuzz targets alone.

pub use crate::hand_over::destination::read_offer;
pub use crate::launcher::{read_mounts, serve_stranger};

/// The messages of QMP in bytes that come in pieces: values, or why they are none.
pub fn read_qmp<'a>(
    pieces: impl Iterator<Item = &'a [u8]>,
) -> Vec<Result<serde_json::Value, String>> {
    crate::qmp::read_all(pieces)
}
