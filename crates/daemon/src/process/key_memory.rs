//! Keys from a command line or a request: in a private file of this process, as if the user had
//! named a file.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

/// Keeps a key: the path of its file, which is there as long as the descriptor is open.
///
/// # Errors
/// The host's: no memory, or no descriptor.
pub fn keep(key: impl AsRef<[u8]>) -> io::Result<(PathBuf, OwnedFd)> {
    let mut file = File::from(rustix::fs::memfd_create("key", rustix::fs::MemfdFlags::CLOEXEC)?);
    file.write_all(key.as_ref())?;
    Ok((format!("/proc/self/fd/{}", file.as_raw_fd()).into(), file.into()))
}
