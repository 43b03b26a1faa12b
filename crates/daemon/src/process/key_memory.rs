//! Keys from a command line or a request. They are stored in a memfd of this process, so that they
//! are read as a key file that the user has named.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

/// Stores a key. Returns the path of its file, which exists as long as the descriptor is open.
///
/// # Errors
/// The host's error: it has no memory or no descriptor left.
pub fn keep(key: impl AsRef<[u8]>) -> io::Result<(PathBuf, OwnedFd)> {
    let mut file = File::from(rustix::fs::memfd_create("key", rustix::fs::MemfdFlags::CLOEXEC)?);
    file.write_all(key.as_ref())?;
    Ok((format!("/proc/self/fd/{}", file.as_raw_fd()).into(), file.into()))
}
