//! Keys from a command line or a request. They are stored in a memfd of this process, so that they
//! are read as a key file that the user has named.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

/// The folder of the paths of kept keys.
const FOLDER: &str = "/proc/self/fd";

/// Stores a key. Returns the path of its file, which exists as long as the descriptor is open.
///
/// # Errors
/// The host's error: it has no memory or no descriptor left.
pub fn keep(key: impl AsRef<[u8]>) -> io::Result<(PathBuf, OwnedFd)> {
    let mut file = File::from(rustix::fs::memfd_create("key", rustix::fs::MemfdFlags::CLOEXEC)?);
    file.write_all(key.as_ref())?;
    Ok((format!("{FOLDER}/{}", file.as_raw_fd()).into(), file.into()))
}

/// Whether this is the path of a kept key: memory of this process, and not a file of the host.
pub(crate) fn is_kept(path: &Path) -> bool {
    path.parent() == Some(Path::new(FOLDER))
        && std::fs::read_link(path).is_ok_and(|link| link == Path::new("/memfd:key (deleted)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kept_key_is_told_from_other_files() {
        let (path, memory) = keep("key").expect("memory");
        assert!(is_kept(&path));
        let other = tempfile::tempfile().expect("a file");
        assert!(!is_kept(Path::new(&format!("{FOLDER}/{}", other.as_raw_fd()))));
        assert!(!is_kept(&Path::new("/proc/self/fd/../fd").join(memory.as_raw_fd().to_string())));
    }
}
