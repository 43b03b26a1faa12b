//! Removing a device from outside of its server.
//!
//! Guarantees: only a process of this program that has the device open is asked to end. Unless the
//! removal is forced, no served device in use is removed, and no server that serves anything else
//! is ended. When a served device has been removed, its server has ended: all its writes are in the
//! image, and the image is not locked.

use std::io::ErrorKind;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use blockhouse_engine::{UblkControl, UblkInfo, ublk_state, wait_readable};
use rustix::fd::OwnedFd;
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::error::Error;
use crate::lifecycle::{Control, find_own, is_served, pid, remove_unserved};
use crate::process_files;

/// How long a server may take to end: requests in flight complete, and the image is flushed.
const END_LIMIT: Duration = Duration::from_secs(60);
/// How long the driver may take to notice that a server has ended.
const NOTICE_LIMIT: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(10);

/// Which uses of a device do not prevent its removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detach {
    /// No use: a served device is removed only if nothing uses it and its server serves nothing
    /// else.
    Unused,
    /// All uses: the device is removed in any case.
    Forced,
}

/// Removes device `id`. The process that serves it is asked to end (SIGTERM), and waited for; a
/// device that waits for its server is removed at once, whatever uses it.
///
/// # Errors
/// The device does not exist, belongs to another program, or is in use; its server has other
/// exports, cannot be found, or does not end within a minute.
pub fn detach(id: u32, how: Detach) -> Result<(), Error> {
    let mut control = UblkControl::open().map_err(Error::opening)?;
    let info = find_own(&mut control, id)?.ok_or(Error::Missing { id })?;
    if !is_served(&control, &info) {
        return remove_unserved(&mut control, id);
    }
    let server = Server::of(&control, &info).ok_or(in_use(&info))?;
    // Held until the server has ended, so that nothing opens the device exclusively meanwhile.
    let mut held = None;
    if how == Detach::Unused {
        server.check_alone(&info)?;
        held = hold_unused(id)?;
    }
    let asked = pidfd_send_signal(&server.process, Signal::TERM);
    asked.map_err(|error| Error::refused("end the server of", id)(error.into()))?;
    if !wait_readable(&server.process, Instant::now() + END_LIMIT).unwrap_or(false) {
        return Err(Error::NotReleased { id, server: info.server });
    }
    drop(held);
    remove_what_is_left(&mut control, &info)
}

fn in_use(info: &UblkInfo) -> Error {
    Error::InUse { id: info.id, server: info.server }
}

/// A process that serves a device, by a pidfd: its ID could be reused at any time.
struct Server {
    process: OwnedFd,
}

impl Server {
    /// The server of a device, if it has the device's file open. The ID alone may belong to another
    /// namespace.
    fn of(control: &impl Control, info: &UblkInfo) -> Option<Self> {
        let process = pidfd_open(pid(info.server)?, PidfdFlags::empty()).ok()?;
        // Checked after the pidfd was opened, so that the pidfd is of the process that has the
        // device open.
        control.has_open(info.server, info.id).then_some(Self { process })
    }

    /// Refuses to end a process that has other exports.
    fn check_alone(&self, info: &UblkInfo) -> Result<(), Error> {
        let Some(process) = pid(info.server) else { return Ok(()) };
        let mut devices = process_files::devices(process);
        devices.retain(|device| *device != info.id);
        if devices.is_empty() && !process_files::listens(process) {
            Ok(())
        } else {
            Err(Error::ServesMore { id: info.id, server: info.server })
        }
    }
}

/// Holds the block device exclusively, as [`blockhouse_engine::hold_unused`]. A device without a
/// node can be removed too.
fn hold_unused(id: u32) -> Result<Option<OwnedFd>, Error> {
    let held = blockhouse_engine::hold_unused(Path::new(&format!("/dev/ublkb{id}")));
    held.map_err(|error| match error.kind() {
        ErrorKind::ResourceBusy => Error::Used { id },
        _ => Error::refused("flush", id)(error),
    })
}

/// Removes the device after its server has ended, unless the server has removed it itself: a server
/// that did not end in an orderly way leaves the device waiting for a server.
fn remove_what_is_left(control: &mut impl Control, ended: &UblkInfo) -> Result<(), Error> {
    let UblkInfo { id, server, .. } = *ended;
    let end = Instant::now() + NOTICE_LIMIT;
    while let Some(info) = find_own(control, id)? {
        if info.server != server && info.state == ublk_state::LIVE {
            return Err(in_use(&info));
        }
        if info.state != ublk_state::LIVE {
            return remove_unserved(control, id);
        }
        if Instant::now() >= end {
            return Err(Error::NotReleased { id, server });
        }
        sleep(PAUSE);
    }
    Ok(())
}
