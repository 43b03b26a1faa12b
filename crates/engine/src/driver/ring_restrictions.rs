//! The restrictions of a ring: the opcodes and registrations that the engine uses, and nothing else
//! (`IORING_REGISTER_RESTRICTIONS`, `io_uring_register(2)`).
//!
//! Guarantees: after [`enable`] has returned, the ring carries out no other opcode and accepts no
//! other registration, and no call can lift that. Reason: a seccomp filter sees no requests of a
//! ring. By an unrestricted ring, code that an attacker runs in this process could open files and
//! connect sockets.
//!
//! The ring must be made disabled (`IORING_SETUP_R_DISABLED`), since the kernel takes restrictions
//! only before it is enabled. Registrations that are needed once, to examine or fill the ring, are
//! made before that, unrestricted.

use std::io;

use io_uring::register::Restriction;
use io_uring::{IoUring, Probe, cqueue, opcode, squeue};

/// Registrations, from `<linux/io_uring.h>`.
pub(crate) mod registration {
    /// `IORING_UNREGISTER_BUFFERS`.
    pub(crate) const UNREGISTER_BUFFERS: u8 = 1;
    /// `IORING_UNREGISTER_FILES`.
    pub(crate) const UNREGISTER_FILES: u8 = 3;
    /// `IORING_REGISTER_EVENTFD`.
    pub(crate) const EVENTFD: u8 = 4;
    /// `IORING_UNREGISTER_EVENTFD`.
    pub(crate) const UNREGISTER_EVENTFD: u8 = 5;
    /// `IORING_REGISTER_FILES_UPDATE`.
    pub(crate) const FILES_UPDATE: u8 = 6;
    /// `IORING_REGISTER_PROBE`: which opcodes the kernel has.
    pub(crate) const PROBE: u8 = 8;
    /// `IORING_REGISTER_FILES2`: a table without files.
    pub(crate) const FILES: u8 = 13;
    /// `IORING_REGISTER_BUFFERS2`: a table without buffers.
    pub(crate) const BUFFERS: u8 = 15;
    /// `IORING_REGISTER_BUFFERS_UPDATE`.
    pub(crate) const BUFFERS_UPDATE: u8 = 16;
}

/// Whether a loop's ring accepts commands to devices (`IORING_OP_URING_CMD`): the device's driver
/// decides what a command does, so only loops that serve such a device allow them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceCommands {
    /// The kernel refuses them.
    #[default]
    Refused,
    /// The kernel carries them out.
    Allowed,
}

/// Whether a request in several segments can name a slot of registered memory that has them all
/// (`IORING_OP_READV_FIXED`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VectoredSlots {
    /// The kernel has no such requests, or carries them out wrongly.
    Unavailable,
    Available,
}

impl VectoredSlots {
    /// Whether the kernel carries these requests out correctly. Linux 6.15 may access the wrong
    /// bytes of memory in huge pages if the memory does not begin at the start of a huge page
    /// (fixed by "io_uring: don't assume uaddr alignment in io_vec_fill_bvec" in 6.16). Another
    /// opcode of 6.16 distinguishes the two versions.
    pub(crate) fn of(probe: &Probe) -> Self {
        let needed = VECTORED.iter().chain(&[opcode::Pipe::CODE]);
        if needed.copied().all(|code| probe.is_supported(code)) {
            Self::Available
        } else {
            Self::Unavailable
        }
    }
}

/// The opcodes of requests in several segments of registered memory.
const VECTORED: [u8; 2] = [opcode::ReadvFixed::CODE, opcode::WritevFixed::CODE];

/// The operations that a kind of ring accepts.
#[derive(Clone, Copy)]
pub(crate) struct Allowed {
    /// Opcodes of submission entries.
    pub(crate) opcodes: &'static [u8],
    /// Opcodes of `io_uring_register`.
    pub(crate) registrations: &'static [u8],
    /// Flags of submission entries.
    pub(crate) flags: squeue::Flags,
    /// The flags that each entry must have.
    required: squeue::Flags,
    /// Commands to devices, in addition to the opcodes.
    commands: DeviceCommands,
    /// Requests in several segments, in addition to the opcodes: a kernel that does not know an
    /// opcode refuses a list that has it.
    vectored_slots: VectoredSlots,
}

impl Allowed {
    /// The same operations, with or without requests in several segments of registered memory.
    pub(crate) fn with_slots(self, vectored_slots: VectoredSlots) -> Self {
        Self { vectored_slots, ..self }
    }

    /// The same operations, with or without commands to devices.
    pub(crate) fn with(self, commands: DeviceCommands) -> Self {
        Self { commands, ..self }
    }
}

/// A loop's ring.
pub(crate) const LOOP: Allowed = Allowed {
    opcodes: &[
        opcode::Read::CODE,
        opcode::ReadFixed::CODE,
        opcode::Readv::CODE,
        opcode::Write::CODE,
        opcode::WriteFixed::CODE,
        opcode::Writev::CODE,
        opcode::Fsync::CODE,
        opcode::Fallocate::CODE,
        opcode::RecvMsg::CODE,
        opcode::SendMsg::CODE,
        opcode::Accept::CODE,
        opcode::PollAdd::CODE,
        opcode::AsyncCancel::CODE,
    ],
    registrations: &[
        registration::UNREGISTER_BUFFERS,
        registration::UNREGISTER_FILES,
        registration::FILES_UPDATE,
        registration::FILES,
        registration::BUFFERS,
        registration::BUFFERS_UPDATE,
    ],
    flags: squeue::Flags::FIXED_FILE,
    required: squeue::Flags::empty(),
    commands: DeviceCommands::Refused,
    vectored_slots: VectoredSlots::Unavailable,
};

/// A ring that sends commands, and only to the devices that it was given when it was made.
pub(crate) const CONTROL: Allowed = Allowed {
    opcodes: &[],
    // A harmless registration, because later kernels treat an empty list as no restriction.
    registrations: &[registration::PROBE],
    flags: squeue::Flags::FIXED_FILE,
    required: squeue::Flags::FIXED_FILE,
    commands: DeviceCommands::Allowed,
    vectored_slots: VectoredSlots::Unavailable,
};

/// A ring whose completions signal an eventfd.
pub(crate) const SIGNAL: Allowed = Allowed {
    opcodes: &[opcode::Nop::CODE],
    registrations: &[registration::EVENTFD, registration::UNREGISTER_EVENTFD],
    flags: squeue::Flags::empty(),
    required: squeue::Flags::empty(),
    commands: DeviceCommands::Refused,
    vectored_slots: VectoredSlots::Unavailable,
};

/// Restricts a ring that was created disabled, and enables it. If the ring is for one thread, the
/// calling thread must be the one that submits to it.
///
/// # Errors
/// The kernel's error: EBADFD for a ring that is enabled already.
pub(crate) fn enable<E: squeue::EntryMarker>(
    ring: &IoUring<E, cqueue::Entry>,
    allowed: &Allowed,
) -> io::Result<()> {
    let commands = match allowed.commands {
        DeviceCommands::Refused => None,
        DeviceCommands::Allowed => Some(opcode::UringCmd16::CODE),
    };
    let vectored: &[u8] = match allowed.vectored_slots {
        VectoredSlots::Unavailable => &[],
        VectoredSlots::Available => &VECTORED,
    };
    let opcodes = allowed.opcodes.iter().chain(vectored).copied().chain(commands);
    let opcodes = opcodes.map(Restriction::sqe_op);
    let registrations = allowed.registrations.iter().map(|&code| Restriction::register_op(code));
    let flags = Restriction::sqe_flags_allowed(allowed.flags.bits());
    let required = Restriction::sqe_flags_required(allowed.required.bits());
    let mut all: Vec<_> = opcodes.chain(registrations).chain([flags, required]).collect();
    ring.submitter().register_restrictions(&mut all)?;
    ring.submitter().register_enable_rings()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::ptr;

    use io_uring::types::{Fd, OpenHow};

    use super::*;

    fn ring(allowed: &Allowed) -> Option<IoUring> {
        let made = IoUring::builder().setup_r_disabled().build(8);
        let made = made.and_then(|ring| enable(&ring, allowed).map(|()| ring));
        made.inspect_err(|error| eprintln!("skipped: {error}")).ok()
    }

    /// The result of an entry that refers to nothing that does not outlive the call.
    fn result_of(ring: &mut IoUring, entry: squeue::Entry) -> i32 {
        // SAFETY: the callers' entries refer to memory that lives until this function returns.
        unsafe { ring.submission().push(&entry) }.expect("an empty queue has room");
        ring.submit_and_wait(1).expect("it is submitted");
        ring.completion().next().expect("a completion").result()
    }

    #[test]
    fn only_what_the_engine_uses_is_carried_out() {
        let Some(mut ring) = ring(&LOOP) else { return };
        let path = c"/etc/passwd".as_ptr();
        let how = OpenHow::new();
        let here = Fd(libc::AT_FDCWD);
        let any = Fd(std::io::stdin().as_raw_fd());
        let refused = [
            opcode::OpenAt::new(here, path).build(),
            opcode::OpenAt2::new(here, path, &raw const how).build(),
            opcode::UnlinkAt::new(here, path).build(),
            opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build(),
            opcode::Connect::new(any, ptr::null(), 0).build(),
            opcode::Bind::new(any, ptr::null(), 0).build(),
            opcode::MsgRingSendFd::new(
                any,
                io_uring::types::Fixed(0),
                io_uring::types::DestinationSlot::auto_target(),
                0,
            )
            .build(),
            opcode::Nop::new().build(),
        ];
        for entry in refused {
            let what = format!("{entry:?}");
            assert_eq!(result_of(&mut ring, entry), -libc::EACCES, "{what}");
        }
        let mut fds = [0; 2];
        // SAFETY: there is memory for the two descriptors that the call stores.
        assert_eq!(unsafe { libc::pipe(fds.as_mut_ptr()) }, 0);
        let word = b"word";
        let entry = opcode::Write::new(Fd(fds[1]), word.as_ptr(), 4).build();
        assert_eq!(result_of(&mut ring, entry), 4);
        let asynchronous = opcode::Write::new(Fd(fds[1]), word.as_ptr(), 4).build();
        let asynchronous = asynchronous.flags(squeue::Flags::ASYNC);
        assert_eq!(result_of(&mut ring, asynchronous), -libc::EACCES, "a flag that is not used");
        ring.submitter().register_files_sparse(4).expect("a table");
        ring.submitter().register_files_update(0, &fds).expect("a slot");
        // SAFETY: descriptors of this test alone.
        let _ = unsafe { (libc::close(fds[0]), libc::close(fds[1])) };
    }

    #[test]
    fn commands_to_devices_are_for_those_rings_that_were_made_for_them() {
        let (any, code) = (Fd(std::io::stdin().as_raw_fd()), 0);
        let entry = || opcode::UringCmd16::new(any, code).build();
        let Some(mut plain) = ring(&LOOP) else { return };
        assert_eq!(result_of(&mut plain, entry()), -libc::EACCES);
        let Some(mut allowed) = ring(&LOOP.with(DeviceCommands::Allowed)) else { return };
        // The effect depends on the file's driver.
        assert!(result_of(&mut allowed, entry()) != -libc::EACCES);
        assert_eq!(result_of(&mut allowed, opcode::Nop::new().build()), -libc::EACCES);
    }

    #[test]
    fn several_segments_of_a_slot_are_for_those_rings_that_were_made_for_them() {
        let Some(mut plain) = ring(&LOOP) else { return };
        let mut probe = Probe::new();
        IoUring::new(2)
            .and_then(|ring| ring.submitter().register_probe(&mut probe))
            .expect("a kernel that has rings tells what they can");
        if VectoredSlots::of(&probe) == VectoredSlots::Unavailable {
            return eprintln!("skipped: this kernel does not have them");
        }
        let any = Fd(std::io::stdin().as_raw_fd());
        let read = || opcode::ReadvFixed::new(any, ptr::null(), 0, 0).build();
        let write = || opcode::WritevFixed::new(any, ptr::null(), 0, 0).build();
        for entry in [read(), write()] {
            assert_eq!(result_of(&mut plain, entry), -libc::EACCES);
        }
        let mut allowed =
            ring(&LOOP.with_slots(VectoredSlots::Available)).expect("it was made without them");
        // There is no slot to name.
        for entry in [read(), write()] {
            assert_ne!(result_of(&mut allowed, entry), -libc::EACCES);
        }
    }

    #[test]
    fn a_control_ring_reaches_only_the_devices_that_it_was_given() {
        let made = IoUring::builder().setup_r_disabled().build(8);
        let Ok(mut ring) = made else { return };
        let given = std::fs::File::open("/dev/null").expect("it is there");
        ring.submitter().register_files(&[given.as_raw_fd()]).expect("a table");
        enable(&ring, &CONTROL).expect("it takes restrictions");
        let of_slot = opcode::UringCmd16::new(io_uring::types::Fixed(0), 0).build();
        let result = result_of(&mut ring, of_slot);
        assert!(result != -libc::EACCES, "{result}");
        let other = opcode::UringCmd16::new(Fd(given.as_raw_fd()), 0).build();
        assert_eq!(result_of(&mut ring, other), -libc::EACCES);
        let slot = io_uring::types::Fixed(0);
        let read = opcode::Read::new(slot, ptr::null_mut(), 0).build();
        assert_eq!(result_of(&mut ring, read), -libc::EACCES);
        let update = ring.submitter().register_files_update(0, &[given.as_raw_fd()]);
        assert_eq!(update.expect_err("it is refused").raw_os_error(), Some(libc::EACCES));
    }

    #[test]
    fn registrations_are_restricted_and_stay_so() {
        let Some(ring) = ring(&SIGNAL) else { return };
        let code = |result: io::Result<()>| result.expect_err("it is refused").raw_os_error();
        let submitter = ring.submitter();
        assert_eq!(code(submitter.register_files_sparse(4)), Some(libc::EACCES));
        assert_eq!(code(submitter.register_personality().map(drop)), Some(libc::EACCES));
        let mut all = [Restriction::sqe_op(opcode::OpenAt::CODE)];
        assert!(submitter.register_restrictions(&mut all).is_err());
    }
}
