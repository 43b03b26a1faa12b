//! Rings whose completions signal an eventfd, and a reserve of them.
//!
//! Guarantees: when its owner drops a ring, the ring is detached from the eventfd and returns to
//! the reserve. If the reserve is empty, a new ring is made. Reason for the reserve: a process that
//! may make no rings (a sandbox forbids that, since a new ring has no restrictions) can still serve
//! guests that connect later.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::{IoUring, opcode};
use parking_lot::Mutex;

use crate::driver::ring_restrictions::{SIGNAL, enable};

/// Maximum attempts to submit a signal, if the kernel has no memory for it.
const ATTEMPTS: usize = 8;

static RESERVE: Mutex<Reserve> = Mutex::new(Reserve { rings: Vec::new(), capacity: 0 });

struct Reserve {
    rings: Vec<IoUring>,
    /// Maximum number of rings in the reserve.
    capacity: usize,
}

/// Makes `count` further rings for signals in advance. Returns how many could be made: none if
/// io_uring is forbidden.
pub fn reserve_signal_rings(count: usize) -> usize {
    let made: Vec<_> = (0..count).map_while(|_| make().ok()).collect();
    let made_count = made.len();
    let mut reserve = RESERVE.lock();
    reserve.capacity += made_count;
    reserve.rings.extend(made);
    made_count
}

fn make() -> io::Result<IoUring> {
    let ring = IoUring::builder().dontfork().setup_r_disabled().build(1)?;
    enable(&ring, &SIGNAL)?;
    Ok(ring)
}

/// A ring that signals one eventfd at most.
pub(crate) struct SignalRing(ManuallyDrop<IoUring>);

impl SignalRing {
    /// A ring without an eventfd.
    ///
    /// # Errors
    /// The kernel's error, if io_uring is forbidden and the reserve is empty.
    pub(crate) fn new() -> io::Result<Self> {
        let reserved = RESERVE.lock().rings.pop();
        let ring = reserved.map_or_else(make, Ok)?;
        Ok(Self(ManuallyDrop::new(ring)))
    }

    /// Makes completions signal `event`.
    ///
    /// # Errors
    /// The kernel's error: EINVAL or EBADF if `event` is not an eventfd.
    pub(crate) fn attach(&self, event: BorrowedFd<'_>) -> io::Result<()> {
        self.0.submitter().register_eventfd(event.as_raw_fd())
    }

    /// Makes completions signal nothing.
    ///
    /// # Errors
    /// The kernel's error: ENXIO if nothing is attached.
    pub(crate) fn detach(&self) -> io::Result<()> {
        self.0.submitter().unregister_eventfd()
    }

    /// Adds 1 to the counter of the eventfd. It does not wait.
    pub(crate) fn signal(&mut self) {
        let ring = &mut *self.0;
        // SAFETY: the entry refers to no memory and to no descriptor.
        let pushed = unsafe { ring.submission().push(&opcode::Nop::new().build()) };
        // If the queue is full, an entry whose submission failed is still in it; submitting that is
        // enough.
        drop(pushed);
        for _ in 0..ATTEMPTS {
            // This does not wait for a completion.
            if ring.submit().is_ok() {
                break;
            }
            std::thread::yield_now();
        }
        ring.completion().for_each(drop);
    }
}

impl Drop for SignalRing {
    fn drop(&mut self) {
        // This fails if nothing is attached.
        let _ = self.detach();
        // SAFETY: the ring is not used after this: the value is dropped.
        let ring = unsafe { ManuallyDrop::take(&mut self.0) };
        let mut reserve = RESERVE.lock();
        if reserve.rings.len() < reserve.capacity {
            reserve.rings.push(ring);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn a_reserved_ring_comes_back_and_forgets_its_eventfd() {
        if reserve_signal_rings(2) < 2 {
            eprintln!("skipped: no io_uring");
            return;
        }
        let events = [0, 1].map(|_| eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd"));
        for _ in 0..10 {
            for event in &events {
                let mut ring = SignalRing::new().expect("one is reserved");
                ring.attach(event.as_fd()).expect("an eventfd");
                ring.signal();
            }
        }
        for event in &events {
            let mut count = [0; 8];
            rustix::io::read(event, &mut count).expect("it was signalled");
            assert_eq!(u64::from_ne_bytes(count), 10);
        }
        // Other tests may use some rings at the same time.
        let reserve = RESERVE.lock();
        assert!(reserve.rings.len() <= reserve.capacity);
    }
}
