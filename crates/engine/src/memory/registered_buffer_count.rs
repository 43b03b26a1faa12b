//! Finding out from outside what memory the rings of a process have in slots of their tables. A
//! measurement that compares registered memory with other is worth nothing without it.
//!
//! How: the kernel lists the slots with their lengths in the ring's `/proc/PID/fdinfo`.

use std::io;
use std::path::Path;

/// How often a busy ring is queried.
const MAX_ATTEMPTS: u32 = 10_000;

/// How many slots of `length` bytes the io_uring rings of a process have, given by its folder in
/// `/proc`. A ring that is closed during this has none.
///
/// # Errors
/// Host errors, for a process that has ended or another user's; `TimedOut` for a ring that stays
/// busy.
pub fn count_registered_buffers(process: &Path, length: usize) -> io::Result<usize> {
    let ending = format!("/{length}");
    let mut count = 0;
    for entry in std::fs::read_dir(process.join("fd"))? {
        let entry = entry?;
        let is_ring = std::fs::read_link(entry.path())
            .is_ok_and(|link| link.as_os_str() == "anon_inode:[io_uring]");
        if is_ring {
            let about = about(&process.join("fdinfo").join(entry.file_name()))?;
            count += about.lines().filter(|line| line.ends_with(&ending)).count();
        }
    }
    Ok(count)
}

/// The kernel's text about a ring; empty if it was closed. While the ring is busy the kernel leaves
/// its tables out, so it is queried again.
fn about(ring: &Path) -> io::Result<String> {
    for _ in 0..MAX_ATTEMPTS {
        let about = match std::fs::read_to_string(ring) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(String::new()),
            about => about?,
        };
        let (_, memory) = about.split_once("UserBufs:").unwrap_or_default();
        // How many slots, and a line for each.
        let mut words = memory.split_whitespace();
        if words.next().is_some_and(|count| count == "0" || words.next() == Some("0:")) {
            return Ok(about);
        }
        std::thread::yield_now();
    }
    let what = format!("{} does not tell of registered memory", ring.display());
    Err(io::Error::new(io::ErrorKind::TimedOut, what))
}
