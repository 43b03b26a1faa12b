//! The URIs of exports.

use std::path::Path;

/// The URI of an export at a Unix socket.
pub fn nbd_uri(export: &str, socket: impl AsRef<Path>) -> String {
    format!("nbd+unix:///{export}?socket={}", socket.as_ref().display())
}
