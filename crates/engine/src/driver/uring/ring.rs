//! One io_uring: its setup with the best flags of this kernel, its submissions and completions, its
//! registered files and buffers.
//!
//! If the kernel supports it, the ring is for one thread (`SINGLE_ISSUER`), and completions run
//! only when the loop asks for them (`DEFER_TASKRUN`). So every call that submits also gets events:
//! otherwise nothing would complete. A flag in memory shows pending completions (`TASKRUN_FLAG`),
//! so polling needs no system call. The ring accepts only the operations that the engine uses
//! (`ring_restrictions`).

use std::io;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::IoVector;
use io_uring::types::{Fd, Timespec};
use io_uring::{IoUring, Probe, cqueue, opcode, squeue};

use crate::driver::broken_wait::BrokenWait;
use crate::driver::file::File;
use crate::driver::fixed_files::{FileId, FileRef, FixedFiles, FixedTable};
use crate::driver::loop_shared::LoopShared;
use crate::driver::operation::{MAX_OPERATIONS, Transfer};
use crate::driver::registered_buffers::BufferTable;
use crate::driver::registrations::Registrations;
use crate::driver::ring_restrictions::{DeviceCommands, LOOP, VectoredSlots, enable};
use crate::mapping::Mapping;

/// Entries of the submission queue between two system calls. Further entries only need another
/// call.
const SUBMISSIONS: u32 = 256;

/// `enter` flags, from `<linux/io_uring.h>`.
const ENTER_GETEVENTS: u32 = 1;
const ENTER_EXT_ARG: u32 = 8;

pub(super) struct Ring {
    uring: IoUring,
    shared: Arc<LoopShared>,
    files: FixedTable,
    memory: BufferTable,
    /// Whether requests with several segments can use registered buffers, too.
    vectored_slots: VectoredSlots,
    broken_wait: BrokenWait,
}

/// The way in which a ring gets completions.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum CompletionMode {
    /// Devices and peers signal completions by interrupts.
    Interrupt,
    /// The kernel polls the devices' queues whenever the ring is entered (`IORING_SETUP_IOPOLL`).
    Polled,
}

/// The submission queue is full: the caller enters the ring first.
pub(super) struct Full;

/// The argument of `io_uring_enter` with `ENTER_EXT_ARG` (`struct io_uring_getevents_arg`).
#[repr(C)]
struct GetEvents {
    signals: u64,
    signals_size: u32,
    min_wait_usec: u32,
    timeout: u64,
}

impl Ring {
    /// A ring for the calling thread, whose loop is `shared`.
    ///
    /// # Errors
    /// The kernel's error, if io_uring is missing, forbidden or too old.
    pub(super) fn open(
        shared: &Arc<LoopShared>,
        completions: CompletionMode,
        commands: DeviceCommands,
    ) -> io::Result<Self> {
        let uring = best_ring(completions)?;
        let vectored_slots = check(&uring)?;
        enable(&uring, &LOOP.with(commands).with_slots(vectored_slots))?;
        let files = FixedTable::new(shared.clone(), FixedFiles::Off);
        let memory = BufferTable::new(shared.clone());
        let (shared, broken_wait) = (Arc::clone(shared), BrokenWait::default());
        Ok(Self { uring, shared, files, memory, vectored_slots, broken_wait })
    }

    /// Adds an entry; the next `enter` submits it.
    pub(super) fn push(&mut self, entry: &squeue::Entry) -> Result<(), Full> {
        // SAFETY: the entry points to memory of an operation in the loop's table, which stays there
        // unmoved until its completion (guaranteed by `operation`); or to the header for that
        // operation, which the engine keeps as long; or to nothing. The caller reports only
        // completions from the kernel, which has then finished with the memory. If the kernel loses
        // a completion, the process ends (`enter`).
        unsafe { self.uring.submission().push(entry) }.map_err(|_| Full)
    }

    /// The entry that `build` makes for the file, or for its slot if it has one. Sets the flag for
    /// a slot last, because `build` overwrites all flags.
    pub(super) fn on_file(
        &mut self,
        file: &File,
        build: impl FnOnce(Fd) -> squeue::Entry,
    ) -> squeue::Entry {
        match self.files.file_ref(&self.uring.submitter(), &file.registrations, file.raw()) {
            FileRef::Fd(descriptor) => build(Fd(descriptor)),
            FileRef::Fixed(slot) => build(Fd(slot as i32)).flags(squeue::Flags::FIXED_FILE),
        }
    }

    /// The registered buffer that has all of this memory, if a request for it can use one.
    pub(super) fn slot_of(&self, vector: &IoVector) -> Option<u16> {
        let can_name =
            vector.segments().len() == 1 || self.vectored_slots == VectoredSlots::Available;
        can_name.then(|| self.memory.slot_of(vector)).flatten()
    }

    /// The slot of this ring that has the transfer's bytes in the kernel's pages.
    pub(super) fn slot_of_pages(&self, transfer: &Transfer) -> Option<u16> {
        transfer.vector.slot_of_pages(self.number())
    }

    /// A number that no other loop's ring has.
    fn number(&self) -> usize {
        Arc::as_ptr(&self.shared).addr()
    }

    /// Takes slots for the kernel's pages; returns the ring's number with them.
    pub(super) fn reserve_slots(&mut self, count: u16) -> io::Result<(usize, Vec<u16>)> {
        Ok((self.number(), self.memory.reserve(&self.uring.submitter(), count)?))
    }

    /// Gives such slots back.
    pub(super) fn release_slots(&mut self, slots: Vec<u16>) {
        self.memory.release(slots);
    }

    /// Submits all entries, and waits for `want` completions, but no longer than `limit`.
    pub(super) fn enter(&mut self, want: u32, limit: Option<Duration>) {
        let timeout =
            limit.map(|limit| Timespec::new().sec(limit.as_secs()).nsec(limit.subsec_nanos()));
        let argument = GetEvents {
            signals: 0,
            signals_size: 0,
            min_wait_usec: 0,
            timeout: timeout.as_ref().map_or(0, |timeout| ptr::from_ref(timeout).addr() as u64),
        };
        let count = self.uring.submission().len() as u32;
        let flags = ENTER_GETEVENTS | ENTER_EXT_ARG;
        // SAFETY: the entries were checked by `push`; `argument` is of the type for EXT_ARG and
        // lives, as the timeout that it points to, until the call returns.
        let entered = unsafe { self.uring.submitter().enter(count, want, flags, Some(&argument)) };
        match entered {
            Ok(_) => self.broken_wait.worked(),
            Err(error) => match error.raw_os_error() {
                // Interrupted, timed out, or completions must be reaped first. In each case the
                // caller reaps completions next.
                Some(libc::EINTR | libc::ETIME | libc::EBUSY) => self.broken_wait.worked(),
                Some(libc::EBADR) => end_process_without_completions(),
                // The kernel has no memory for a request. Reaping a completion may free some;
                // without a completion, the loop pauses and tries again.
                Some(libc::EAGAIN) if !self.uring.completion().is_empty() => {}
                _ => self.broken_wait.failed("io_uring_enter", &error),
            },
        }
    }

    /// The completions that can be reaped now.
    pub(super) fn completions(&mut self) -> cqueue::CompletionQueue<'_> {
        self.uring.completion()
    }

    /// Whether the kernel has completions that the next `enter` runs.
    pub(super) fn has_completions(&mut self) -> bool {
        self.uring.submission().taskrun()
    }

    /// Whether `enter` has something to do: entries to submit, work for the kernel to run, or
    /// completions that wait for queue space.
    pub(super) fn needs_enter(&mut self) -> bool {
        let submission = self.uring.submission();
        !submission.is_empty() || submission.taskrun() || submission.cq_overflow()
    }

    /// Sets whether files get slots from now on. No operation may be in flight.
    pub(super) fn set_fixed_files(&mut self, fixed: FixedFiles) {
        self.files.close(&self.uring.submitter());
        self.files = FixedTable::new(self.shared.clone(), fixed);
    }

    /// Frees the slot of a closed file, if it has one.
    pub(super) fn unregister_file(&mut self, file: &FileId) {
        self.files.unregister(&self.uring.submitter(), file);
    }

    /// Registers memory as buffers.
    pub(super) fn register_memory(&mut self, memory: &Registrations<Mapping>) -> io::Result<()> {
        self.memory.add(&self.uring.submitter(), memory)
    }

    /// Unregisters memory that is no longer used, if it is registered.
    pub(super) fn unregister_memory(&mut self, mapping: &Mapping) {
        self.memory.unregister(&self.uring.submitter(), mapping);
    }

    /// Unregisters all memory. No operation may be in flight.
    pub(super) fn unregister_all_memory(&mut self) {
        self.memory.close(&self.uring.submitter());
    }
}

/// Aborts: the kernel ran out of memory and dropped completions (io_uring_enter(2)). The dropped
/// completions are unknown. A cancel does not find a direct transfer in progress at its device, so
/// the transfer's memory must not be reused. When the process ends the kernel waits for the
/// devices, and a service manager restarts the server.
pub(super) fn end_process_without_completions() -> ! {
    eprintln!(
        "blockhouse: io_uring dropped completions, because the kernel is short of memory: ending"
    );
    std::process::abort()
}

/// A ring with the best flags that this kernel supports, disabled.
fn best_ring(completions: CompletionMode) -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    builder.setup_cqsize(2 * MAX_OPERATIONS as u32).setup_clamp().dontfork().setup_r_disabled();
    if completions == CompletionMode::Polled {
        builder.setup_iopoll();
    }
    let kinds: [fn(&mut io_uring::Builder); 3] = [
        |builder| {
            builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
            builder.setup_submit_all();
        },
        |builder| {
            builder.setup_coop_taskrun().setup_taskrun_flag();
            builder.setup_submit_all();
        },
        |_| {},
    ];
    let mut refused = io::Error::from_raw_os_error(libc::EINVAL);
    for kind in kinds {
        let mut attempt = builder.clone();
        kind(&mut attempt);
        match attempt.build(SUBMISSIONS) {
            Ok(ring) => return Ok(ring),
            // The kernel does not know a flag.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => refused = error,
            Err(error) => return Err(error),
        }
    }
    Err(refused)
}

/// Refuses a ring without a feature that this engine needs. Returns the optional features.
fn check(ring: &IoUring) -> io::Result<VectoredSlots> {
    let too_old = |what: &str| {
        let text = format!("this kernel's io_uring is too old: it lacks {what}");
        Err(io::Error::new(io::ErrorKind::Unsupported, text))
    };
    let parameters = ring.params();
    if !parameters.is_feature_nodrop() || !parameters.is_feature_ext_arg() {
        return too_old("kept completions or timed waits");
    }
    // Multishot poll cannot be queried. The kernel got it together with this feature.
    if !parameters.is_feature_resource_tagging() {
        return too_old("polls that stay");
    }
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let needed = [
        ("read", opcode::Read::CODE),
        ("write", opcode::Write::CODE),
        ("readv", opcode::Readv::CODE),
        ("writev", opcode::Writev::CODE),
        ("fsync", opcode::Fsync::CODE),
        ("fallocate", opcode::Fallocate::CODE),
        ("recvmsg", opcode::RecvMsg::CODE),
        ("sendmsg", opcode::SendMsg::CODE),
        ("accept", opcode::Accept::CODE),
        ("poll", opcode::PollAdd::CODE),
        ("cancel", opcode::AsyncCancel::CODE),
    ];
    match needed.into_iter().find(|&(_, code)| !probe.is_supported(code)) {
        Some((name, _)) => too_old(name),
        None => Ok(VectoredSlots::of(&probe)),
    }
}
