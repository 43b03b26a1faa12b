//! Attaches and detaches devices `/dev/nbdN`, and ends their servers.
//!
//! Guarantees: when a device is attached, it exists with its size. Devices of other programs are
//! not touched, unless [`Detach`] says so: a device of this program names the socket of its server
//! (`/sys/block/nbdN/backend`). When a device is detached, its server has ended, if it can be
//! found, and all its data is in the image.

use std::fs;
use std::io::ErrorKind;
use std::ops::RangeInclusive;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags};

use crate::driver::{Driver, Wanted};
use crate::error::Error;
use crate::handshake::negotiate;
use crate::server::{Found, Server, is_open};

/// The prefix of the `backend` of this program's devices, before the socket's path.
const MARK: &str = "blockhouse ";
/// The sizes of logical blocks that the kernel supports, in bytes.
const BLOCKS: RangeInclusive<u64> = 512..=4096;
/// How long the kernel may take to create a device.
const NODE_LIMIT: Duration = Duration::from_secs(10);
/// How long the flush of a device may take whose server is not known.
const HOLD_LIMIT: Duration = Duration::from_secs(30);
/// The alignment of memory for direct reads, in bytes: the largest logical block.
const ALIGNMENT: usize = 4096;
const PAUSE: Duration = Duration::from_millis(2);

/// The uses that a device may have when it is detached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detach {
    /// Nothing.
    Unused,
    /// Nothing; the device may be of another program, whose server is left alone.
    UnusedOfAny,
    /// Anything.
    Forced,
}

/// Finds out whether the kernel has the driver.
///
/// # Errors
/// Why it cannot be used.
pub fn check_driver() -> Result<(), Error> {
    Driver::open().map(drop)
}

/// Attaches the default export of the server at a Unix socket as a block device, with this number
/// or the lowest that is free. Returns the number.
///
/// # Errors
/// There is no driver, the process lacks the right, the server refuses, or the number is taken.
pub fn attach(socket: &Path, number: Option<u32>) -> Result<u32, Error> {
    let mut driver = Driver::open()?;
    let failed = |error: std::io::Error| Error::Server {
        socket: socket.to_owned(),
        what: error.to_string(),
    };
    let mut stream = UnixStream::connect(socket).map_err(failed)?;
    let export = negotiate(&mut stream).map_err(failed)?;
    let backend = format!("{MARK}{}", socket.display());
    let (size, flags) = (export.size, export.flags.bits());
    let block_size = export.block.clamp(*BLOCKS.start(), *BLOCKS.end());
    let wanted = Wanted { number, size, block_size, flags, backend: &backend };
    let made = driver.connect(&wanted, &stream).map_err(|error| {
        let name = number.map_or("an NBD device".to_owned(), |number| format!("/dev/nbd{number}"));
        Error::refused(format!("make {name}"), error)
    })?;
    wait_for_node(made, size).inspect_err(|_| drop(driver.disconnect(made)))?;
    Ok(made)
}

/// Waits until the block device exists with its size.
fn wait_for_node(number: u32, size: u64) -> Result<(), Error> {
    let end = Instant::now() + NODE_LIMIT;
    let expected = (size / 512).to_string();
    let node = node(number);
    while !node.exists() || attribute(number, "size").as_ref() != Some(&expected) {
        if Instant::now() >= end {
            return Err(Error::NoNode(number));
        }
        sleep(PAUSE);
    }
    Ok(())
}

fn node(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/nbd{number}"))
}

fn attribute(number: u32, name: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/sys/block/nbd{number}/{name}")).ok()?;
    Some(text.trim().to_owned())
}

/// Disconnects a device that [`attach`] has made, and ends its server. A device whose server has
/// ended already is removed even if it is in use.
///
/// # Errors
/// The device is not connected, belongs to another program (unless `how` allows that), is in use,
/// or cannot be flushed; its server does not end within a minute.
pub fn detach(number: u32, how: Detach) -> Result<(), Error> {
    let mut driver = Driver::open()?;
    if attribute(number, "pid").is_none() {
        return Err(Error::Missing(number));
    }
    let backend = attribute(number, "backend").unwrap_or_default();
    // The server is found first: one that ends with its last client no longer listens afterwards.
    let server = match backend.strip_prefix(MARK) {
        Some(socket) => Server::find(Path::new(socket))?,
        None if how == Detach::UnusedOfAny => Found::Unknown,
        None => return Err(Error::Foreign(number)),
    };
    // Requests in flight fail at the disconnect. So the device is first held, to prevent new uses,
    // and flushed, for programs that have it open. A forced detach neither holds nor flushes the
    // device.
    let _held = match (how, &server) {
        // Opening the device of a server that has ended may block until it is disconnected.
        (Detach::Forced, _) | (_, Found::Ended) => None,
        (_, Found::Listens(_)) => hold_unused(number)?,
        (_, Found::Unknown) => {
            let socket = backend.strip_prefix(MARK).map(Path::new);
            hold_in_time(number, socket.is_some_and(is_open))?
        }
    };
    let disconnected = driver.disconnect(number);
    disconnected.map_err(|error| Error::refused(format!("disconnect /dev/nbd{number}"), error))?;
    match server {
        Found::Listens(server) => server.end(),
        Found::Ended | Found::Unknown => Ok(()),
    }
}

/// Holds a device whose server is not known, as [`hold_unused`]. Without a server the flush fails,
/// and a read fails or waits: then nothing is held, because nothing can be written. `is_served`:
/// the server runs, even if its reads fail.
///
/// # Errors
/// The device is in use, or is not flushed in time, or its server runs or answers and the flush
/// fails.
fn hold_in_time(number: u32, is_served: bool) -> Result<Option<OwnedFd>, Error> {
    match in_time(HOLD_LIMIT, move || hold_unused(number)) {
        // A server that is only slow must not lose data, so the device stays.
        None => Err(cannot_flush(number, ErrorKind::TimedOut.into())),
        Some(Err(error)) if !is_served && !matches!(error, Error::Used(_)) => {
            match in_time(HOLD_LIMIT, move || can_read(&node(number))) {
                Some(true) => Err(error),
                Some(false) | None => Ok(None),
            }
        }
        Some(held) => held,
    }
}

/// The result of `work` in a thread of its own; `None` after `limit`. A thread that is blocked ends
/// when the device is disconnected, or with this process.
fn in_time<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (done, result) = mpsc::channel();
    thread::spawn(move || done.send(work()));
    result.recv_timeout(limit).ok()
}

/// Whether a read of the first block succeeds, not from the page cache.
fn can_read(device: &Path) -> bool {
    let mut bytes = [0; 2 * ALIGNMENT];
    let start = bytes.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
    let flags = OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC;
    let opened = rustix::fs::open(device, flags, Mode::empty());
    let read = |device| rustix::io::read(&device, &mut bytes[start..start + ALIGNMENT]);
    opened.and_then(read).is_ok_and(|length| length > 0)
}

/// Holds the block device, as [`blockhouse_engine::hold_unused`].
fn hold_unused(number: u32) -> Result<Option<OwnedFd>, Error> {
    blockhouse_engine::hold_unused(&node(number)).map_err(|error| match error.kind() {
        ErrorKind::ResourceBusy => Error::Used(number),
        _ => cannot_flush(number, error),
    })
}

fn cannot_flush(number: u32, error: std::io::Error) -> Error {
    Error::refused(format!("flush /dev/nbd{number}"), error)
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn a_device_that_answers_can_be_read() {
        let folder = tempfile::tempdir().expect("a folder");
        assert!(!can_read(&folder.path().join("missing")));
        assert!(!can_read(folder.path()));
        let file = folder.path().join("file");
        fs::write(&file, []).expect("room");
        let flags = OFlags::RDONLY | OFlags::DIRECT;
        if rustix::fs::open(&file, flags, Mode::empty()).is_err_and(|error| error == Errno::INVAL) {
            eprintln!("skipped: the file system of temporary files has no direct reads");
            return;
        }
        assert!(!can_read(&file), "no byte is read");
        fs::write(&file, [0; ALIGNMENT]).expect("room");
        assert!(can_read(&file));
    }

    #[test]
    fn work_that_blocks_has_no_result() {
        let (_open, wait) = mpsc::channel::<()>();
        assert_eq!(in_time(Duration::ZERO, move || wait.recv().is_ok()), None);
        assert_eq!(in_time(HOLD_LIMIT, || 1), Some(1));
    }
}
