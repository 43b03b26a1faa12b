//! Operations. Any thread can begin an operation; librbd completes it, and the caller fetches the
//! completion.
//!
//! Guarantees: an operation's memory is neither moved nor freed until librbd has completed the
//! operation; the waiter of each operation that was begun is notified once.

use std::ffi::c_int;
use std::io;
use std::ptr;
use std::sync::atomic::Ordering;

use blockhouse_core::{ByteRange, IoVector};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::check;
use super::image::Image;
use super::library::Handle;
use super::waiter::{Completion, Waiter};

/// The most completions that one call fetches.
const MAX_COMPLETIONS: usize = 64;
/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`.
const THICK_PROVISION: c_int = 1;
/// The interval of checks for completions while draining.
const DRAIN_TIMEOUT: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// A command to an image.
pub(crate) enum Command {
    /// Fills the memory from an offset on.
    Read(u64, IoVector),
    /// Stores the memory from an offset on.
    Write(u64, IoVector),
    /// Makes a range read as zeros; `is_thick` keeps the range's space allocated.
    WriteZeroes { range: ByteRange, is_thick: bool },
    /// Frees the space of whole objects, or of large parts of them.
    Discard(ByteRange),
    /// Makes all completed writes durable.
    Flush,
}

/// The memory that an operation owns while it is in flight.
struct InFlight<W> {
    /// The memory of a read or write. librbd accesses its bytes, and the list of its segments,
    /// until the completion.
    memory: Option<IoVector>,
    waiter: W,
}

impl<W: Waiter> Image<W> {
    /// Begins an operation. When the operation has ended, [`reap`](Self::reap) or the close drops
    /// its memory and notifies its waiter.
    ///
    /// # Errors
    /// librbd refuses the operation, which was then not begun.
    pub(crate) fn submit(&self, command: Command, waiter: W) -> io::Result<()> {
        let (call, memory) = match command {
            Command::Read(offset, memory) => (Call::Read(offset), Some(memory)),
            Command::Write(offset, memory) => (Call::Write(offset), Some(memory)),
            Command::WriteZeroes { range, is_thick } => (Call::WriteZeroes(range, is_thick), None),
            Command::Discard(range) => (Call::Discard(range), None),
            Command::Flush => (Call::Flush, None),
        };
        let owned = Box::into_raw(Box::new(InFlight { memory, waiter }));
        let mut completion = ptr::null_mut();
        // SAFETY: without a callback librbd only hands the argument back.
        let created = check(unsafe {
            (self.rbd().rbd_aio_create_completion)(owned.cast(), None, &raw mut completion)
        });
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the box is `InFlight`, stays until the completion is taken out, and nothing uses
        // it until then.
        let begun = created.and_then(|_| unsafe { self.begin(call, owned, completion) });
        if let Err(error) = begun {
            self.in_flight.fetch_sub(1, Ordering::Relaxed);
            // SAFETY: librbd has refused the operation, so it uses neither the completion nor the
            // box, and no completion comes.
            unsafe {
                if !completion.is_null() {
                    (self.rbd().rbd_aio_release)(completion);
                }
                drop(Box::from_raw(owned));
            }
            return Err(error);
        }
        Ok(())
    }

    /// # Safety
    /// `owned` is not moved, changed or dropped before the completion.
    unsafe fn begin(
        &self,
        call: Call,
        owned: *const InFlight<W>,
        completion: Handle,
    ) -> io::Result<()> {
        let (rbd, image) = (self.rbd(), self.handle);
        // SAFETY: the caller guarantees that the box is there, and so are segments and bytes
        // (`IoVector`). A guest may change bytes meanwhile; librbd copies what it sends.
        let code = unsafe {
            let segments = (*owned).memory.as_ref().map_or(&[][..], IoVector::segments);
            let count = c_int::try_from(segments.len()).unwrap_or(c_int::MAX);
            let first = segments.as_ptr();
            match call {
                Call::Read(offset) => (rbd.rbd_aio_readv)(image, first, count, offset, completion),
                Call::Write(offset) => {
                    (rbd.rbd_aio_writev)(image, first, count, offset, completion)
                }
                Call::WriteZeroes(range, is_thick) => {
                    let flags = if is_thick { THICK_PROVISION } else { 0 };
                    let (offset, length) = (range.offset(), range.length() as usize);
                    (rbd.rbd_aio_write_zeroes)(image, offset, length, completion, flags, 0)
                }
                Call::Discard(range) => {
                    (rbd.rbd_aio_discard)(image, range.offset(), range.length(), completion)
                }
                Call::Flush => (rbd.rbd_aio_flush)(image, completion),
            }
        };
        check(code).map(drop)
    }

    /// Fetches all completions: drops the operations' memory, and notifies their waiters.
    pub(crate) fn reap(&self) {
        let rbd = self.rbd();
        let mut completions = [ptr::null_mut(); MAX_COMPLETIONS];
        loop {
            let (first, room) = (completions.as_mut_ptr(), MAX_COMPLETIONS as c_int);
            // SAFETY: `completions` has room for that many.
            let count = unsafe { (rbd.rbd_poll_io_events)(self.handle, first, room) };
            // The call fails only without `rbd_set_image_notification`, and then an image is not
            // opened.
            let count = usize::try_from(count).unwrap_or(0);
            for &completion in &completions[..count] {
                // SAFETY: each completion comes out once. Its argument is the box that `submit`
                // made of an `InFlight` of the same image, thus of the same `W`, and librbd is done
                // with it.
                let (owned, result) = unsafe {
                    let owned = (rbd.rbd_aio_get_arg)(completion).cast::<InFlight<W>>();
                    let result = (rbd.rbd_aio_get_return_value)(completion);
                    (rbd.rbd_aio_release)(completion);
                    (Box::from_raw(owned), result)
                };
                let InFlight { memory, waiter } = *owned;
                drop(memory);
                self.in_flight.fetch_sub(1, Ordering::Relaxed);
                waiter.complete(outcome(result));
            }
            if count < MAX_COMPLETIONS {
                return;
            }
        }
    }

    /// Completes operations until none is in flight; blocks.
    pub(super) fn drain(&self) {
        while self.in_flight.load(Ordering::Relaxed) > 0 {
            // The eventfd is reset before the completions are fetched, so that no completion is
            // missed.
            let _ = rustix::io::read(&self.notifier, &mut [0; 8]);
            self.reap();
            if self.in_flight.load(Ordering::Relaxed) > 0 {
                let mut waited = [PollFd::new(&self.notifier, PollFlags::IN)];
                // If the poll fails, the loop only fetches completions once more.
                let _ = poll(&mut waited, Some(&DRAIN_TIMEOUT));
            }
        }
    }

    /// Another descriptor of the eventfd that is signalled for each completion.
    pub(crate) fn notifier(&self) -> io::Result<std::os::fd::OwnedFd> {
        self.notifier.try_clone()
    }
}

/// A command without its memory.
enum Call {
    Read(u64),
    Write(u64),
    WriteZeroes(ByteRange, bool),
    Discard(ByteRange),
    Flush,
}

/// Decodes a count or a negative errno in one number, the convention of the kernel and of Ceph.
fn outcome(result: isize) -> Completion {
    u64::try_from(result).map_err(|_| io::Error::from_raw_os_error(-(result as i32)))
}
