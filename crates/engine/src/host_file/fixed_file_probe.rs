//! Finds out whether a loop's requests name a file by its slot in the ring's table or by its
//! descriptor. A measurement that compares the two is not valid without this check.
//!
//! Method: `dup3` replaces the open descriptor by one of /dev/null. A read through the descriptor
//! then reads nothing; a read through the registered slot still reads the file.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;

use blockhouse_core::{Buffer, Error, ErrorKind, Result, Storage};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::driver::fixed_files::FixedFiles;
use crate::host_file::{HostFile, OpenMode, PageCache};

const BLOCK: usize = 4096;

/// Tests whether the current loop's reads of the file at `path` use a slot ([`FixedFiles::On`]) or
/// the descriptor. The test opens the file again, with `cache`, and only reads it. The file must
/// begin with a block of 4096 bytes that are not all zero.
///
/// # Errors
/// The host's error; `InvalidInput` for a file that does not begin with such a block.
///
/// # Panics
/// Outside of an event loop.
pub async fn probe_fixed_file(path: &Path, cache: PageCache) -> Result<FixedFiles> {
    let file = HostFile::open(path, OpenMode::ReadOnly, cache)?;
    let failed = |error: Errno| Error::host("cannot change the descriptor", error.into());
    if file.size() < BLOCK as u64 {
        return Err(Error::new(ErrorKind::InvalidInput, "is too short").on(file.name()));
    }
    let mut wanted = Buffer::new(BLOCK);
    // The first request puts the file into its slot, if it gets one.
    file.read(0, wanted.lend()).await?;
    if wanted.bytes().iter().all(|&byte| byte == 0) {
        let what = "begins with zeros, which could come from anywhere";
        return Err(Error::new(ErrorKind::InvalidInput, what).on(file.name()));
    }
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let nothing = rustix::fs::open("/dev/null", flags, Mode::empty()).map_err(failed)?;
    let kept = rustix::io::fcntl_dupfd_cloexec(file.descriptor(), 0).map_err(failed)?;
    replace_fd(&file, nothing.as_fd()).map_err(failed)?;
    let mut found = Buffer::new(BLOCK);
    let outcome = file.read(0, found.lend()).await;
    replace_fd(&file, kept.as_fd()).map_err(failed)?;
    let same = outcome.is_ok() && found.bytes() == wanted.bytes();
    Ok(if same { FixedFiles::On } else { FixedFiles::Off })
}

/// Replaces `file`'s descriptor by `other`, without the engine's knowledge.
fn replace_fd(file: &HostFile, other: BorrowedFd<'_>) -> rustix::io::Result<()> {
    let number = file.descriptor().as_raw_fd();
    // SAFETY: both descriptors are open, and the number stays that of an open descriptor, which the
    // file continues to own.
    match unsafe { libc::dup3(other.as_raw_fd(), number, libc::O_CLOEXEC) } {
        -1 => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
        _ => Ok(()),
    }
}
