//! Counts the registered buffers and files of a process's rings. A benchmark that compares
//! registered with other memory uses this to verify that buffers are registered.
//!
//! Method: the kernel lists the slots of both tables in the ring's `/proc/PID/fdinfo`.

use std::io;
use std::path::Path;

/// The maximum number of times that a busy ring is queried.
const MAX_ATTEMPTS: u32 = 10_000;

/// The number of registered buffers of `length` bytes in all io_uring rings of a process. `process`
/// is its folder in `/proc`. A ring that is closed meanwhile is treated as empty.
///
/// # Errors
/// Host errors, if the process has ended or belongs to another user; `TimedOut` if a ring stays
/// busy.
pub fn count_registered_buffers(process: &Path, length: usize) -> io::Result<usize> {
    let ending = format!("/{length}");
    count_lines(process, |line| line.ends_with(&ending))
}

/// The number of file slots, in all io_uring rings of a process, whose file is `path` or in that
/// folder. `path` is absolute and without symbolic links; the rest is as for
/// [`count_registered_buffers`], errors included.
pub fn count_registered_files(process: &Path, path: &Path) -> io::Result<usize> {
    let is_in_slot = |line: &str| {
        line.split_once(": ").is_some_and(|(_, file)| Path::new(file).starts_with(path))
    };
    count_lines(process, is_in_slot)
}

/// The number of lines about the process's rings for which `is_counted` holds.
fn count_lines(process: &Path, is_counted: impl Fn(&str) -> bool) -> io::Result<usize> {
    let mut count = 0;
    for entry in std::fs::read_dir(process.join("fd"))? {
        let entry = entry?;
        let is_ring = std::fs::read_link(entry.path())
            .is_ok_and(|link| link.as_os_str() == "anon_inode:[io_uring]");
        if is_ring {
            let about = about(&process.join("fdinfo").join(entry.file_name()))?;
            count += about.lines().filter(|line| is_counted(line)).count();
        }
    }
    Ok(count)
}

/// The ring's `fdinfo`; empty if the ring was closed. The kernel omits the tables of a busy ring,
/// so it is queried again.
fn about(ring: &Path) -> io::Result<String> {
    for _ in 0..MAX_ATTEMPTS {
        let about = match std::fs::read_to_string(ring) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(String::new()),
            about => about?,
        };
        let (_, memory) = about.split_once("UserBufs:").unwrap_or_default();
        // The number of slots, then a line for each slot.
        let mut words = memory.split_whitespace();
        if words.next().is_some_and(|count| count == "0" || words.next() == Some("0:")) {
            return Ok(about);
        }
        std::thread::yield_now();
    }
    let what = format!("{} does not list its tables", ring.display());
    Err(io::Error::new(io::ErrorKind::TimedOut, what))
}
