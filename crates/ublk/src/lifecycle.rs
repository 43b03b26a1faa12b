//! The sequence of commands until a device takes requests, and until it is removed.
//!
//! ```text
//!             Add, SetParameters          all tags fetched, Start
//!  (nothing) ------------------> dead, made --------------------> live
//!                                                                 |  ^
//!                                       the server's process ends |  | all tags fetched,
//!                                                                 v  | EndRecovery
//!  (nothing) <------------------ dead <------------------------ quiesced, StartRecovery
//!                Delete                      Stop
//! ```
//!
//! Guarantees: a device that another process serves, or that was made for another image, is not
//! touched. Reason: its block device may be mounted, and the content of another image would destroy
//! the file system. The driver keeps a note about the image ([`note_of`]) for as long as the device
//! exists. No error names a process that does not have the device: process IDs are reused, and the
//! reader of the error may end that process.

use std::io;
use std::thread::sleep;
use std::time::Duration;

use blockhouse_core::errno;
use blockhouse_engine::{UblkCommand, UblkControl, UblkInfo, ublk_flag, ublk_state};
use rustix::process::Pid;

use crate::error::Error;
use crate::parameters::Parameters;
use crate::process_files;

/// The number in a command that asks for a device with any number.
const ANY: u32 = u32::MAX;
/// The interval of the checks of a device that is about to be released.
const PAUSE: Duration = Duration::from_millis(2);
/// How many pauses to wait for the end of a killed server: ten seconds, because its I/O in flight
/// completes first.
const MAX_PAUSES: u32 = 5000;
/// The number of pauses after which a server that still exists is treated as running: two seconds.
/// A process that was killed exists until its files are closed.
const MAX_PAUSES_OF_SERVER: u32 = 1000;
/// How long to wait for the deletion of a device. A process that has the block device open may
/// delay it for ever.
const DELETE_LIMIT: Duration = Duration::from_secs(2);
/// The target of `/proc/self/ns/pid` in the initial PID namespace (`PROC_PID_INIT_INO` in Linux).
const FIRST_PID_NAMESPACE: &str = "pid:[4026531836]";
/// The upper 16 bits of each note of this program.
const MARK: u64 = 0xb10c << 48;
/// The lower 48 bits of a note, which identify the image.
const IMAGE_BITS: u64 = (1 << 48) - 1;

/// The flags that a device must have.
const NEEDED: u64 =
    ublk_flag::CMD_IOCTL_ENCODE | ublk_flag::USER_RECOVERY | ublk_flag::USER_RECOVERY_REISSUE;
/// Optional flags of a device: a driver drops flags that it does not know.
const WISHED: u64 = ublk_flag::UPDATE_SIZE;
/// The features of a driver whose devices may leave data in the kernel's pages. `BATCH_IO` stands
/// for Linux 7.0: some earlier drivers use pages after the server that had them was killed (fixed
/// by "ublk: avoid ublk_io_release() called after ublk char dev is closed").
const NEEDED_FOR_PAGES: u64 = ublk_flag::PAGES | ublk_flag::BATCH_IO;

/// The driver, and queries of the host.
pub(crate) trait Control {
    /// As [`UblkControl::command`].
    fn command(
        &mut self,
        command: UblkCommand,
        id: u32,
        argument: u64,
        buffer: &mut [u8],
    ) -> io::Result<()>;

    /// As [`UblkControl::command_within`].
    fn command_within(
        &mut self,
        command: UblkCommand,
        id: u32,
        limit: Duration,
    ) -> io::Result<Option<()>>;

    /// Whether this process is in a PID namespace other than the initial one. If so, the driver
    /// knows this process by another ID.
    fn is_in_pid_namespace(&self) -> bool;

    /// Whether there is a process with this id.
    fn process_exists(&self, process: i32) -> bool;

    /// Whether a process has the character device open. False also if this process may not find
    /// out.
    fn has_open(&self, process: i32, id: u32) -> bool;

    /// Waits before the next check.
    fn pause(&mut self);
}

impl Control for UblkControl {
    fn command(
        &mut self,
        command: UblkCommand,
        id: u32,
        argument: u64,
        buffer: &mut [u8],
    ) -> io::Result<()> {
        Self::command(self, command, id, argument, buffer)
    }

    fn command_within(
        &mut self,
        command: UblkCommand,
        id: u32,
        limit: Duration,
    ) -> io::Result<Option<()>> {
        Self::command_within(self, command, id, limit)
    }

    fn is_in_pid_namespace(&self) -> bool {
        let own = std::fs::read_link("/proc/self/ns/pid");
        own.is_ok_and(|own| own.as_os_str() != FIRST_PID_NAMESPACE)
    }

    fn process_exists(&self, process: i32) -> bool {
        let found = pid(process).map(rustix::process::test_kill_process);
        // A process of another user exists too, although this one may not signal it.
        found.is_some_and(|found| found != Err(rustix::io::Errno::SRCH))
    }

    fn has_open(&self, process: i32, id: u32) -> bool {
        pid(process).is_some_and(|process| process_files::devices(process).contains(&id))
    }

    fn pause(&mut self) {
        sleep(PAUSE);
    }
}

/// The device to acquire.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// The number; `None` for any.
    pub(crate) id: Option<u32>,
    /// The number of its queues, if the device does not exist yet.
    pub(crate) queues: u16,
    /// The depth of each queue, if the device does not exist yet.
    pub(crate) depth: u16,
    /// Maximum bytes of a request.
    pub(crate) max_io_bytes: u32,
    /// The server's process.
    pub(crate) server: i32,
    /// The note about its image.
    pub(crate) note: u64,
    /// The parameters.
    pub(crate) parameters: Parameters,
    /// Whether a new device leaves data in the kernel's pages, if the driver can.
    pub(crate) takes_pages: bool,
}

/// How a device was acquired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The device is new.
    Added,
    /// The device was waiting for a server.
    Recovered,
    /// The device was waiting for a server, and an earlier server was killed while it recovered the
    /// device.
    RecoveredAgain,
}

/// A device whose queues can be served now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Acquired {
    pub(crate) id: u32,
    pub(crate) origin: Origin,
    /// The parameters that the kernel has.
    pub(crate) parameters: Parameters,
}

/// The process whose ID the driver has. `None` for numbers below 1, such as -1 of a stopped device,
/// because kill(2) would signal several processes.
pub(crate) fn pid(number: i32) -> Option<Pid> {
    if number > 0 { Pid::from_raw(number) } else { None }
}

/// The note of a device about its image (FNV-1a of its name).
pub(crate) fn note_of(image: &str) -> u64 {
    let hash = image.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    MARK | hash & IMAGE_BITS
}

/// Makes the device, or takes over the existing one that waits for its server.
pub(crate) fn acquire(control: &mut impl Control, wanted: &Wanted) -> Result<Acquired, Error> {
    let features = check_driver(control)?;
    let Some(id) = wanted.id else { return add(control, wanted, features, ANY) };
    let mut pauses = 0;
    loop {
        let Some(info) = find(control, id)? else {
            match add(control, wanted, features, id) {
                // The removal of the former device with this number is not complete.
                Err(Error::Refused { cause, .. }) if is_busy(&cause) && pauses < MAX_PAUSES => {}
                outcome => return outcome,
            }
            pauses += 1;
            control.pause();
            continue;
        };
        check_note(&info, wanted.note)?;
        let exists = control.process_exists(info.server);
        match info.state {
            ublk_state::QUIESCED => {
                if let Some(recovered) = recover(control, wanted, &info)? {
                    return Ok(recovered);
                }
            }
            // The server has stopped the device, and removes it next or has died before that. The
            // device exists as long as a process has it open.
            ublk_state::DEAD if pid(info.server).is_none() => match pauses {
                0 => remove(control, id)?,
                MAX_PAUSES_OF_SERVER.. => return Err(Error::StillOpen { id }),
                _ => {}
            },
            ublk_state::DEAD if !exists && pauses == 0 => remove(control, id)?,
            _ if exists && pauses >= MAX_PAUSES_OF_SERVER => {
                return Err(in_use(control, &info));
            }
            _ => {}
        }
        if pauses >= MAX_PAUSES {
            return Err(Error::NotReleased { id, server: info.server });
        }
        pauses += 1;
        control.pause();
    }
}

/// The error for a device that cannot be acquired because its process exists.
fn in_use(control: &impl Control, info: &UblkInfo) -> Error {
    let UblkInfo { id, server, state, .. } = *info;
    // A server that is starting has the device's file open from the beginning.
    if state == ublk_state::DEAD && !control.has_open(server, id) {
        Error::NotStarted { id, server }
    } else {
        Error::InUse { id, server }
    }
}

fn is_busy(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::AlreadyExists | io::ErrorKind::ResourceBusy)
}

/// Refuses a driver that lacks a needed feature; returns its features.
pub(crate) fn check_driver(control: &mut impl Control) -> Result<u64, Error> {
    let mut features = [0; 8];
    match control.command(UblkCommand::GetFeatures, ANY, 0, &mut features) {
        Ok(()) => match u64::from_ne_bytes(features) {
            features if features & NEEDED == NEEDED => Ok(features),
            _ => Err(Error::TooOld),
        },
        Err(error) => match error.raw_os_error() {
            Some(errno::EINVAL | errno::EOPNOTSUPP) => Err(Error::TooOld),
            _ => Err(Error::refused("ask for features for", 0)(error)),
        },
    }
}

/// Refuses a device that does not exist, is of another image or program, or transfers data in a way
/// that this program does not know.
pub(crate) fn check_device(control: &mut impl Control, id: u32, note: u64) -> Result<(), Error> {
    let info = find(control, id)?.ok_or(Error::Missing { id })?;
    check_note(&info, note)?;
    info.check_data_way().map_err(Error::refused("take over", id))
}

/// Refuses a device of another image or program.
fn check_note(info: &UblkInfo, wanted: u64) -> Result<(), Error> {
    let UblkInfo { id, note, state, .. } = *info;
    match note & !IMAGE_BITS == MARK {
        true if note == wanted => Ok(()),
        true if state == ublk_state::QUIESCED => Err(Error::OtherImage { id }),
        true => Err(Error::OtherServed { id }),
        false => Err(Error::Foreign { id }),
    }
}

/// The device, if it exists.
fn find(control: &mut impl Control, id: u32) -> Result<Option<UblkInfo>, Error> {
    let mut bytes = [0; UblkInfo::BYTES];
    match control.command(UblkCommand::GetInfo, id, 0, &mut bytes) {
        Ok(()) => Ok(Some(UblkInfo::from_bytes(&bytes))),
        Err(error) if error.raw_os_error() == Some(errno::ENODEV) => Ok(None),
        Err(error) => Err(Error::refused("look at", id)(error)),
    }
}

/// Makes a new device, by a driver with these features.
fn add(
    control: &mut impl Control,
    wanted: &Wanted,
    features: u64,
    id: u32,
) -> Result<Acquired, Error> {
    let has_pages = wanted.takes_pages && features & NEEDED_FOR_PAGES == NEEDED_FOR_PAGES;
    let info = UblkInfo {
        queues: wanted.queues,
        depth: wanted.depth,
        state: ublk_state::DEAD,
        max_io_bytes: wanted.max_io_bytes,
        id,
        server: wanted.server,
        flags: NEEDED | WISHED | if has_pages { ublk_flag::PAGES } else { 0 },
        note: wanted.note,
    };
    let mut bytes = info.to_bytes();
    control
        .command(UblkCommand::Add, id, 0, &mut bytes)
        .map_err(Error::refused("add", if id == ANY { 0 } else { id }))?;
    let made = UblkInfo::from_bytes(&bytes);
    let id = made.id;
    let ready = if made.flags & NEEDED == NEEDED {
        set_parameters(control, id, &wanted.parameters)
    } else {
        Err(Error::TooOld)
    };
    ready.inspect_err(|_| drop(delete(control, id)))?;
    Ok(Acquired { id, origin: Origin::Added, parameters: wanted.parameters })
}

fn set_parameters(
    control: &mut impl Control,
    id: u32,
    parameters: &Parameters,
) -> Result<(), Error> {
    let set = control.command(UblkCommand::SetParameters, id, 0, &mut parameters.to_bytes());
    set.map_err(Error::refused("set the parameters of", id))
}

/// Takes over a device that waits for its server; `None` if the rest of the former server still
/// holds it.
fn recover(
    control: &mut impl Control,
    wanted: &Wanted,
    info: &UblkInfo,
) -> Result<Option<Acquired>, Error> {
    let id = info.id;
    info.check_data_way().map_err(Error::refused("take over", id))?;
    let mut bytes = wanted.parameters.to_bytes();
    let known = control.command(UblkCommand::GetParameters, id, 0, &mut bytes);
    known.map_err(Error::refused("ask for the parameters of", id))?;
    let known = wanted.parameters.as_known(&bytes);
    let parameters = known.map_err(|what| Error::Changed { id, what })?;
    let can_resize = info.flags & ublk_flag::UPDATE_SIZE != 0;
    if parameters.size != wanted.parameters.size && !can_resize {
        let (was, is) = (parameters.size, wanted.parameters.size);
        let what = format!("it had {was} bytes and has {is} now, and this kernel cannot follow");
        return Err(Error::Changed { id, what });
    }
    match control.command(UblkCommand::StartRecovery, id, 0, &mut []) {
        Ok(()) => Ok(Some(Acquired { id, origin: Origin::Recovered, parameters })),
        Err(error) if is_busy(&error) => Ok(None),
        // Linux before 6.16: a server began the recovery of this device and was killed before it
        // had fetched a queue. The device accepts fetches as it is, unless that server had mapped
        // its descriptors.
        Err(error) if error.raw_os_error() == Some(errno::EINVAL) => {
            Ok(Some(Acquired { id, origin: Origin::RecoveredAgain, parameters }))
        }
        Err(error) => Err(Error::refused("recover", id)(error)),
    }
}

/// Starts the device, which takes requests from now on. The caller's queues have fetched all tags
/// before.
pub(crate) fn start(
    control: &mut impl Control,
    acquired: &Acquired,
    server: i32,
) -> Result<(), Error> {
    let (command, what) = match acquired.origin {
        Origin::Added => (UblkCommand::Start, "start"),
        Origin::Recovered | Origin::RecoveredAgain => (UblkCommand::EndRecovery, "go on with"),
    };
    let process = u64::try_from(server).expect("the id of a process");
    let started = control.command(command, acquired.id, process, &mut []);
    started.map_err(|error| {
        if error.raw_os_error() == Some(errno::EINVAL) && control.is_in_pid_namespace() {
            Error::PidNamespace { what, id: acquired.id, cause: error }
        } else {
            Error::refused(what, acquired.id)(error)
        }
    })
}

/// Gives the block device of a live device another size, in sectors.
pub(crate) fn update_size(control: &mut impl Control, id: u32, sectors: u64) -> Result<(), Error> {
    // Kernels before 7.0 crash if there is no block device.
    let has_disk = find(control, id)?.is_some_and(|info| info.state != ublk_state::DEAD);
    if !has_disk {
        return Err(Error::Missing { id });
    }
    let updated = control.command(UblkCommand::UpdateSize, id, sectors, &mut []);
    updated.map_err(Error::refused("change the size of", id))
}

/// Removes the block device. Requests in flight complete first, so they must still be served. Then
/// all commands of its queues complete. If the kernel lacks a worker or memory for the command, it
/// is repeated for ten seconds.
pub(crate) fn stop(control: &mut impl Control, id: u32) -> Result<(), Error> {
    let mut pauses = 0;
    loop {
        match control.command(UblkCommand::Stop, id, 0, &mut []) {
            Err(error) if is_short(&error) && pauses < MAX_PAUSES => {
                pauses += 1;
                control.pause();
            }
            outcome => return outcome.map_err(Error::refused("stop", id)),
        }
    }
}

/// Whether a command failed for a temporary lack of resources. A ring that cannot create a worker
/// cancels the command.
fn is_short(error: &io::Error) -> bool {
    let short = [errno::ECANCELED, errno::EAGAIN, errno::ENOMEM, errno::EINTR];
    error.raw_os_error().is_some_and(|code| short.contains(&code))
}

/// Removes the device. If a process has its block device open, the device vanishes when the last
/// process closes it; then the number is free. Waits for that only on old kernels, up to
/// [`DELETE_LIMIT`].
pub(crate) fn delete(control: &mut impl Control, id: u32) -> Result<(), Error> {
    let outcome = control.command(UblkCommand::DeleteAsync, id, 0, &mut []).or_else(|error| {
        match error.raw_os_error() {
            // The only command before about Linux 6.11 removes the device, then waits until no
            // process has it open.
            Some(errno::EOPNOTSUPP | errno::EINVAL) => {
                control.command_within(UblkCommand::Delete, id, DELETE_LIMIT).map(drop)
            }
            _ => Err(error),
        }
    });
    outcome.map_err(Error::refused("remove", id))
}

/// The device of this program, if it exists.
pub(crate) fn find_own(control: &mut impl Control, id: u32) -> Result<Option<UblkInfo>, Error> {
    match find(control, id)? {
        Some(info) if info.note & !IMAGE_BITS != MARK => Err(Error::Foreign { id }),
        found => Ok(found),
    }
}

/// Whether a process serves a device, or is about to, as far as this process can find out.
pub(crate) fn is_served(control: &impl Control, info: &UblkInfo) -> bool {
    match info.state {
        ublk_state::QUIESCED => false,
        // The process that made the device may have died, and its ID may belong to another process
        // now.
        ublk_state::DEAD => control.has_open(info.server, info.id),
        _ => control.process_exists(info.server),
    }
}

/// Removes a device of this program that has no server.
pub(crate) fn remove_unserved(control: &mut impl Control, id: u32) -> Result<(), Error> {
    let info = find_own(control, id)?.ok_or(Error::Missing { id })?;
    if is_served(control, &info) {
        return Err(Error::InUse { id, server: info.server });
    }
    match stop(control, id) {
        // Another process has removed it meanwhile.
        Err(error) if error.is_missing() => Ok(()),
        Err(error) => Err(error),
        Ok(()) => remove(control, id),
    }
}

/// Removes the device, which another process may do at the same time.
pub(crate) fn remove(control: &mut impl Control, id: u32) -> Result<(), Error> {
    match delete(control, id) {
        Err(error) if error.is_missing() => Ok(()),
        outcome => outcome,
    }
}

#[cfg(test)]
mod tests;
