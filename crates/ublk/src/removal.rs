//! Removing a device from outside of its server.
//!
//! Guarantee: no process is told to end but one of this program that has the device open.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use blockhouse_engine::{UblkControl, ublk_state};
use rustix::process::{Pid, Signal, kill_process};

use crate::error::Error;
use crate::lifecycle::{Control, find_own, remove_unserved};

/// How long a server may take to end: what it has in flight completes, and is flushed.
const END_LIMIT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(10);

/// Removes device `id`. The process that serves it is asked to end (SIGTERM), with all that it serves, and waited for; a
/// device that waits for its server is removed at once.
///
/// # Errors
/// There is none, it is another program's, its server cannot be found, or does not end for a minute.
pub fn detach(id: u32) -> Result<(), Error> {
    let mut control = UblkControl::open().map_err(Error::opening)?;
    let info = find_own(&mut control, id)?.ok_or(Error::Missing { id })?;
    if info.state == ublk_state::QUIESCED || !control.process_exists(info.server) {
        return remove_unserved(&mut control, id);
    }
    let process = Pid::from_raw(info.server).filter(|process| has_open(*process, id));
    let process = process.ok_or(Error::InUse { id, server: info.server })?;
    let asked = kill_process(process, Signal::TERM);
    asked.map_err(|error| Error::refused("end the server of", id)(error.into()))?;
    let end = Instant::now() + END_LIMIT;
    while find_own(&mut control, id)?.is_some_and(|info| info.state != ublk_state::DEAD) {
        if Instant::now() >= end {
            return Err(Error::NotReleased { id, server: info.server });
        }
        sleep(PAUSE);
    }
    Ok(())
}

/// Whether a process has the device's own file open. A number alone may be of another namespace.
fn has_open(process: Pid, id: u32) -> bool {
    let device = PathBuf::from(format!("/dev/ublkc{id}"));
    let folder = Path::new("/proc").join(process.to_string()).join("fd");
    let Ok(files) = fs::read_dir(folder) else { return false };
    files.flatten().any(|file| fs::read_link(file.path()).is_ok_and(|target| target == device))
}
