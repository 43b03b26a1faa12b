//! Handles requests that fail on the host: logs the failure, and makes the error that the client
//! gets.

use std::cell::Cell;

use blockhouse_core::{Error, ErrorKind};

use crate::command::{Command, RequestError};
use crate::proto::Errno;

/// Logs only the first request of a connection that fails on the host, because a broken disk fails
/// every request.
#[derive(Default)]
pub struct FailureLog {
    has_logged: Cell<bool>,
}

impl FailureLog {
    /// Logs the error of a request to `export`, unless the client caused it.
    pub fn note(&self, export: &str, error: &Error) {
        if error.is_host_failure() && !self.has_logged.replace(true) {
            tracing::warn!(export, "a request failed: {error}");
        }
    }
}

/// The error that the client gets. Its text contains no path of the host.
pub fn request_error(error: &Error, command: &Command) -> RequestError {
    let message = match error.kind() {
        ErrorKind::InvalidInput | ErrorKind::LacksChanges => "the request does not fit the export",
        ErrorKind::PastEnd => "the range reaches past the end of the export",
        ErrorKind::NoSpace => "the host has no space left",
        ErrorKind::ReadOnly => "the export is read-only",
        ErrorKind::Unsupported => "the disk cannot do this",
        ErrorKind::Locked => "another program uses the disk",
        ErrorKind::Corrupt => "the disk image is damaged",
        ErrorKind::Io => "the host failed the operation",
    };
    let errno = match Errno::from_linux(error.errno()) {
        // The protocol allows ENOTSUP only for WRITE_ZEROES.
        Errno::NotSup if !matches!(command, Command::WriteZeroes { .. }) => Errno::Inval,
        errno => errno,
    };
    RequestError { errno, message }
}
