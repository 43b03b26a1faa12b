//! Waiting for one descriptor, on a thread that does nothing else.

use std::io;
use std::os::fd::AsFd;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Waits until a descriptor can be read (a pidfd: until its process has ended). Returns `false` at
/// the deadline.
///
/// # Errors
/// The kernel's error.
pub fn wait_readable(descriptor: &impl AsFd, deadline: Instant) -> io::Result<bool> {
    loop {
        let rest = deadline.saturating_duration_since(Instant::now());
        let rest = Timespec::try_from(rest).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(descriptor, PollFlags::IN)], Some(&rest)) {
            Err(Errno::INTR) => {}
            outcome => return Ok(outcome? > 0),
        }
    }
}
