//! Commands to the driver as a whole: a ring of its own, since they block, and their entries are longer than a loop's.
//!
//! Guarantees: the ring can send commands to `/dev/ublk-control` and do nothing else, from the moment that it is made: it
//! has one file, every entry must name a file by its slot, and no registration is allowed
//! (`ring_restrictions`). A command's buffer is borrowed until the driver is done with it. Commands are carried out with the
//! capabilities that the process had when the ring was made (`IORING_REGISTER_PERSONALITY`). Reason: the driver asks for
//! CAP_SYS_ADMIN to the end of a device, and a server that is confined need not have that for anything else.

use std::io;
use std::os::fd::AsRawFd;

use io_uring::types::Fixed;
use io_uring::{IoUring, opcode, squeue};
use rustix::fs::{Mode, OFlags};

use super::wire::{UblkCommand, UblkInfo, control_bytes};
use crate::broken_wait::BrokenWait;
use crate::ring_restrictions::{CONTROL, enable};

/// The driver's control device.
const PATH: &str = "/dev/ublk-control";
/// The only slot of the ring's table of files.
const SLOT: Fixed = Fixed(0);

/// The control device of the driver. A command blocks the calling thread until it has completed.
pub struct UblkControl {
    ring: IoUring<squeue::Entry128>,
    personality: u16,
    broken_wait: BrokenWait,
}

impl UblkControl {
    /// Opens it.
    ///
    /// # Errors
    /// The kernel's: `NotFound` without the driver, `PermissionDenied`; or why there can be no ring.
    pub fn open() -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let file = rustix::fs::open(PATH, flags, Mode::empty())?;
        let ring = IoUring::builder().dontfork().setup_r_disabled().build(1)?;
        // The ring keeps the file open.
        ring.submitter().register_files(&[file.as_raw_fd()])?;
        let personality = ring.submitter().register_personality()?;
        enable(&ring, &CONTROL)?;
        Ok(Self { ring, personality, broken_wait: BrokenWait::default() })
    }

    /// Has the driver carry out a command for device `id`. What the argument and the buffer are for is said at the command.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Panics
    /// For a buffer of more than 64 KiB; when the kernel takes no commands for ten seconds.
    pub fn command(
        &mut self,
        command: UblkCommand,
        id: u32,
        argument: u64,
        buffer: &mut [u8],
    ) -> io::Result<()> {
        let length = u16::try_from(buffer.len()).expect("a short buffer");
        let address = if buffer.is_empty() { 0 } else { buffer.as_mut_ptr().expose_provenance() };
        let bytes = control_bytes(id, address as u64, length, argument);
        let entry = opcode::UringCmd80::new(SLOT, command.code()).cmd(bytes).build();
        let entry = entry.personality(self.personality);
        // SAFETY: the entry refers to the buffer, whose length it tells the driver, and this function borrows it until
        // the completion is there. Each command completes before the next one, so there is room.
        unsafe { self.ring.submission().push(&entry) }.expect("an empty queue has room");
        loop {
            match self.ring.submit_and_wait(1) {
                Ok(_) => self.broken_wait.worked(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => self.broken_wait.failed("io_uring_enter", &error),
            }
            if let Some(completion) = self.ring.completion().next() {
                return match completion.result() {
                    0.. => Ok(()),
                    error => Err(io::Error::from_raw_os_error(-error)),
                };
            }
        }
    }

    /// What device `id` is like.
    ///
    /// # Errors
    /// The driver's: ENODEV where there is none.
    pub fn info(&mut self, id: u32) -> io::Result<UblkInfo> {
        let mut bytes = [0; UblkInfo::BYTES];
        self.command(UblkCommand::GetInfo, id, 0, &mut bytes)?;
        Ok(UblkInfo::from_bytes(&bytes))
    }
}
