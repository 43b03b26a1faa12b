//! The completions on a file that can be polled for, instead of waiting for the device's
//! interrupts. These are completions of direct I/O on a block device with poll queues. For a file
//! in a file system on such a device, only reads can be polled for.
//!
//! The support is determined at open, from the kernel's description of the device. If the kernel
//! refuses to poll nevertheless, polling ends from then on. This module changes no settings.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use blockhouse_core::{Error, ErrorKind, Result};
use rustix::fs::FileType;

use crate::driver::request_queue::RequestQueue;

/// Whether a loop polls for the completions of reads and writes, on files that support it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoPoll {
    /// The loop polls, and does not sleep while any such operation is in flight.
    On,
    /// Reads and writes complete by interrupts.
    Off,
}

/// Checks whether completions of direct I/O on `path`, a file or block device, can be polled for.
///
/// # Errors
/// [`ErrorKind::Unsupported`] with the reason and advice; host errors, if this cannot be
/// determined.
pub fn check_io_poll(path: &Path) -> Result<()> {
    let name = path.display().to_string();
    let status = rustix::fs::stat(path)
        .map_err(|error| Error::host("cannot examine", error.into()).on(&name))?;
    let queue = RequestQueue::of_file(&status);
    if queue.has_polled() {
        return Ok(());
    }
    let why = match queue.device_name() {
        Some(device) => format!("{device} has no queues to poll"),
        None => "it is on no block device that has queues to poll".into(),
    };
    let what = format!("completions cannot be polled for: {why}");
    let hint = "load the disk's driver with some (nvme or virtio_blk: poll_queues=N), or leave out \
                --io-poll";
    Err(Error::new(ErrorKind::Unsupported, what).on(&name).hint(hint))
}

/// The operations on an open file that can be polled for.
pub(crate) struct Pollable {
    /// Whether any operation, and so every read, can be polled for.
    reads: AtomicBool,
    writes: PollableWrites,
}

/// The writes that can be polled for, if reads can.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PollableWrites {
    /// None: a write to a file in a file system needs more work after the I/O, so Linux completes
    /// it by an interrupt (`fs/iomap/direct-io.c`), and polling for it would be waste.
    None,
    /// Writes without `RWF_DSYNC`. If the device has no FUA, the kernel adds a flush after a
    /// durable write, and cannot poll for the flush.
    Plain,
    All,
}

impl Pollable {
    /// No operation can be polled for, because the page cache or memory completes all of them.
    pub(crate) fn none() -> Self {
        Self { reads: false.into(), writes: PollableWrites::None }
    }

    /// The polling support of the file's device. The file is open for direct I/O.
    pub(crate) fn find(file: &impl AsFd) -> Self {
        let Ok(status) = rustix::fs::fstat(file) else { return Self::none() };
        let queue = RequestQueue::of_file(&status);
        let writes = match FileType::from_raw_mode(status.st_mode) {
            FileType::BlockDevice if queue.has_fua() || queue.has_no_cache() => PollableWrites::All,
            FileType::BlockDevice => PollableWrites::Plain,
            _ => PollableWrites::None,
        };
        Self { reads: queue.has_polled().into(), writes }
    }

    /// Whether reads can be polled for.
    pub(crate) fn reads(&self) -> bool {
        self.reads.load(Relaxed)
    }

    /// Whether plain writes can be polled for.
    pub(crate) fn plain_writes(&self) -> bool {
        self.writes != PollableWrites::None && self.reads()
    }

    /// Whether durable writes can be polled for.
    pub(crate) fn durable_writes(&self) -> bool {
        self.writes == PollableWrites::All && self.reads()
    }

    /// Records that the kernel refuses to poll. Returns whether that is new.
    pub(crate) fn refuse(&self) -> bool {
        self.reads.swap(false, Relaxed)
    }
}

#[cfg(test)]
impl Pollable {
    /// Every operation can be polled for, on any device.
    pub(crate) fn everything() -> Self {
        Self { reads: true.into(), writes: PollableWrites::All }
    }
}
