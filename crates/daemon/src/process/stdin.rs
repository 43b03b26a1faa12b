//! A socket that the parent process has passed as standard input.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{Mode, OFlags, open};

/// Takes the socket. Standard input reads as empty from then on.
///
/// # Errors
/// The kernel's error.
pub(crate) fn take_stdin() -> io::Result<OwnedFd> {
    let socket = io::stdin().as_fd().try_clone_to_owned()?;
    let null = open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::stdio::dup2_stdin(null)?;
    Ok(socket)
}
