//! Commands to the ublk driver's control device. The commands have a separate ring, because they
//! block and have longer entries than a loop's ring.
//!
//! Guarantees: from its creation on, the ring can only send commands to `/dev/ublk-control`: it has
//! one file, every entry must name a file by its slot, and no registration is allowed
//! (`ring_restrictions`). A command's buffer is borrowed until the driver has completed the
//! command. Commands are carried out with the capabilities that the process had when the ring was
//! made (`IORING_REGISTER_PERSONALITY`). Reason: the driver requires CAP_SYS_ADMIN until the end of
//! a device, and a confined server needs it for nothing else.

use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use io_uring::types::{Fixed, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};
use rustix::fs::{Mode, OFlags};

use super::wire::{UblkCommand, UblkInfo, control_bytes};
use crate::driver::broken_wait::BrokenWait;
use crate::driver::ring_restrictions::{CONTROL, enable};

/// The driver's control device.
const PATH: &str = "/dev/ublk-control";
/// The only slot of the ring's table of files.
const SLOT: Fixed = Fixed(0);

/// The control device of the driver. A command blocks the calling thread until it has completed.
pub struct UblkControl {
    ring: IoUring<squeue::Entry128>,
    personality: u16,
    broken_wait: BrokenWait,
    /// The number of the last command. It identifies the command's completion.
    last: u64,
}

impl UblkControl {
    /// Opens the control device.
    ///
    /// # Errors
    /// Errors of the kernel: `NotFound` without the driver, `PermissionDenied`, or no ring can be
    /// created.
    pub fn open() -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let file = rustix::fs::open(PATH, flags, Mode::empty())?;
        let ring = IoUring::builder().dontfork().setup_r_disabled().build(1)?;
        // The ring keeps the file open.
        ring.submitter().register_files(&[file.as_raw_fd()])?;
        let personality = ring.submitter().register_personality()?;
        enable(&ring, &CONTROL)?;
        Ok(Self { ring, personality, broken_wait: BrokenWait::default(), last: 0 })
    }

    /// Makes the driver carry out a command for device `id`. The command's documentation describes
    /// the argument and the buffer.
    ///
    /// # Errors
    /// Errors of the driver.
    ///
    /// # Panics
    /// For a buffer of 64 KiB or more. If `io_uring_enter` fails for ten seconds without a success,
    /// the process aborts. A command that the driver does not complete blocks without limit.
    pub fn command(
        &mut self,
        command: UblkCommand,
        id: u32,
        argument: u64,
        buffer: &mut [u8],
    ) -> io::Result<()> {
        // SAFETY: the buffer is borrowed until this function returns. Without a time limit, `wait`
        // returns only after the completion, or aborts the process.
        unsafe { self.push(command, id, argument, buffer) };
        self.wait(None).unwrap_or_else(|| std::process::abort())
    }

    /// As [`command`](Self::command) without a buffer, but waits at most for `limit`, then returns
    /// `None`. The driver continues with the command. Dropping this value interrupts the command.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn command_within(
        &mut self,
        command: UblkCommand,
        id: u32,
        limit: Duration,
    ) -> io::Result<Option<()>> {
        // SAFETY: there is no buffer.
        unsafe { self.push(command, id, 0, &mut []) };
        self.wait(Some(limit)).transpose()
    }

    /// Queues a command.
    ///
    /// # Safety
    /// The buffer is borrowed until [`wait`](Self::wait) has returned a result.
    unsafe fn push(&mut self, command: UblkCommand, id: u32, argument: u64, buffer: &mut [u8]) {
        let length = u16::try_from(buffer.len()).expect("a short buffer");
        let address = if buffer.is_empty() { 0 } else { buffer.as_mut_ptr().expose_provenance() };
        let bytes = control_bytes(id, address as u64, length, argument);
        let entry = opcode::UringCmd80::new(SLOT, command.code()).cmd(bytes).build();
        self.last += 1;
        let entry = entry.personality(self.personality).user_data(self.last);
        // SAFETY: the entry refers to the buffer, whose length it tells the driver, and to nothing
        // else. The caller keeps it borrowed until the completion. Each entry is submitted before
        // the next one is pushed, so there is space.
        unsafe { self.ring.submission().push(&entry) }.expect("an empty queue has room");
    }

    /// Submits, and waits for the completion of the last command; `None` at the end of `limit`.
    /// Does not unwind while the driver has a buffer: a wait that fails for seconds aborts the
    /// process.
    fn wait(&mut self, limit: Option<Duration>) -> Option<io::Result<()>> {
        let end = limit.map(|limit| Instant::now() + limit);
        loop {
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            let time = left.map(Timespec::from);
            let waited = match &time {
                Some(time) => {
                    self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(time))
                }
                None => self.ring.submit_and_wait(1),
            };
            match waited {
                Ok(_) => self.broken_wait.worked(),
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR | libc::ETIME) => {}
                    _ => self.broken_wait.failed_or_abort("io_uring_enter", &error),
                },
            }
            // An earlier command whose wait timed out may complete first.
            let last = self.last;
            if let Some(completion) = self.ring.completion().find(|one| one.user_data() == last) {
                return Some(match completion.result() {
                    0.. => Ok(()),
                    error => Err(io::Error::from_raw_os_error(-error)),
                });
            }
            // An entry that the kernel did not take would leave no room for the next command.
            if left == Some(Duration::ZERO) && self.ring.submission().is_empty() {
                return None;
            }
        }
    }

    /// The description of device `id`.
    ///
    /// # Errors
    /// Errors of the driver: ENODEV if there is no such device.
    pub fn info(&mut self, id: u32) -> io::Result<UblkInfo> {
        let mut bytes = [0; UblkInfo::BYTES];
        self.command(UblkCommand::GetInfo, id, 0, &mut bytes)?;
        Ok(UblkInfo::from_bytes(&bytes))
    }
}
