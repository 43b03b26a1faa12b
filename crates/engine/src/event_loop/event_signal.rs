//! Signalling an eventfd of another process without ever waiting for it.
//!
//! A write to an eventfd waits while its counter is full, unless its `O_NONBLOCK` is set. The other
//! process may change both at any time, also between a check and the write, and a loop that waits
//! delays all requests that it serves. The kernel's own signals never wait: a full counter stays
//! full. So here the eventfd is signalled by the completion of an operation that does nothing, on a
//! ring of its own or, if io_uring is forbidden, by Linux AIO. The kernel accepts only an eventfd
//! for that, so this also distinguishes eventfds from other descriptors.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use crate::driver::linux_aio::Signaller;
use crate::event_loop::signal_rings::SignalRing;

/// An eventfd to be signalled. The descriptor itself is not kept.
pub struct EventSignal(Way);

enum Way {
    Ring(Box<RefCell<SignalRing>>),
    Aio(Signaller),
}

impl EventSignal {
    /// A way to signal `event`.
    ///
    /// # Errors
    /// `InvalidInput` if `event` is not an eventfd; the kernel's error if neither io_uring nor
    /// Linux AIO can be used.
    pub fn new(event: impl AsFd) -> io::Result<Self> {
        let event = event.as_fd();
        let by_aio = || Signaller::new(event).map(Way::Aio);
        let way = match SignalRing::new() {
            Ok(ring) => by_ring(ring, event)
                .or_else(|error| if is_other_kind(&error) { Err(error) } else { by_aio() }),
            Err(_) => by_aio(),
        };
        way.map(Self).map_err(|error| {
            if is_other_kind(&error) {
                io::Error::new(io::ErrorKind::InvalidInput, "this is no eventfd")
            } else {
                let what = "an eventfd cannot be signalled without waiting";
                let text = format!("{what}: {error}; allow io_uring or Linux AIO");
                io::Error::new(error.kind(), text)
            }
        })
    }

    /// Adds 1 to the counter, unless it is full. If it is full, a signal is pending already.
    pub fn signal(&self) {
        match &self.0 {
            Way::Ring(ring) => ring.borrow_mut().signal(),
            Way::Aio(signaller) => signaller.signal(),
        }
    }
}

/// Whether the kernel's error means that a descriptor is not an eventfd.
fn is_other_kind(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EBADF))
}

fn by_ring(ring: SignalRing, event: BorrowedFd<'_>) -> io::Result<Way> {
    ring.attach(event)?;
    Ok(Way::Ring(Box::new(RefCell::new(ring))))
}

/// Whether a descriptor from elsewhere is an eventfd; false if this cannot be determined.
pub fn is_eventfd(descriptor: impl AsFd) -> bool {
    is_eventfd_by("/proc/self/fd", descriptor.as_fd())
}

/// As [`is_eventfd`], by the links in this folder, or by the kernel's refusal if there are none.
fn is_eventfd_by(links: &str, descriptor: BorrowedFd<'_>) -> bool {
    match std::fs::read_link(format!("{links}/{}", descriptor.as_raw_fd())) {
        Ok(target) => target.as_os_str() == "anon_inode:[eventfd]",
        Err(_) => is_eventfd_by_ring(descriptor),
    }
}

/// As [`is_eventfd`], by registering the descriptor with a ring. The thread keeps this ring,
/// because a new one for each check would take longer than a front-end needs to request a check.
fn is_eventfd_by_ring(descriptor: BorrowedFd<'_>) -> bool {
    thread_local! {
        static RING: Option<SignalRing> = SignalRing::new().ok();
    }
    RING.with(|ring| {
        let Some(ring) = ring else { return EventSignal::new(descriptor).is_ok() };
        ring.attach(descriptor).is_ok() && ring.detach().is_ok()
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::time::Duration;

    use rustix::event::{EventfdFlags, epoll, eventfd};
    use rustix::fs::{MemfdFlags, OFlags, fcntl_getfl, fcntl_setfl, memfd_create};

    use super::*;

    /// Each way to signal, independent of this machine's choice.
    fn ways(event: &OwnedFd) -> Vec<EventSignal> {
        let aio = Signaller::new(event.as_fd()).map(Way::Aio);
        let ring = SignalRing::new().and_then(|ring| by_ring(ring, event.as_fd()));
        [ring, aio].into_iter().flatten().map(EventSignal).collect()
    }

    fn count(event: &OwnedFd) -> u64 {
        let mut count = [0; 8];
        rustix::io::read(event, &mut count).unwrap();
        u64::from_ne_bytes(count)
    }

    #[test]
    fn each_signal_counts() {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        for way in ways(&event) {
            (0..1000).for_each(|_| way.signal());
            assert_eq!(count(&event), 1000);
        }
    }

    #[test]
    fn a_full_counter_never_blocks_whatever_its_owner_does() {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        for way in ways(&event) {
            // The owner clears O_NONBLOCK, and fills the counter.
            fcntl_setfl(&event, fcntl_getfl(&event).unwrap() - OFlags::NONBLOCK).unwrap();
            rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
            let (done, told) = std::sync::mpsc::channel();
            let thread = std::thread::spawn(move || {
                way.signal();
                done.send(()).unwrap();
            });
            let outcome = told.recv_timeout(Duration::from_secs(10));
            assert!(count(&event) >= u64::MAX - 1);
            thread.join().unwrap();
            outcome.expect("a signal that does not wait");
        }
    }

    #[test]
    fn other_descriptors_are_told_apart_without_proc() {
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        let others: [OwnedFd; 6] = [
            reader,
            writer,
            socket.into(),
            memfd_create("file", MemfdFlags::CLOEXEC).unwrap(),
            epoll::create(epoll::CreateFlags::CLOEXEC).unwrap(),
            std::fs::File::open("/dev/zero").unwrap().into(),
        ];
        for links in ["/proc/self/fd", "/nowhere"] {
            // Twice, because the first check must leave no state.
            assert!(is_eventfd_by(links, event.as_fd()), "{links}");
            assert!(is_eventfd_by(links, event.as_fd()), "{links}");
            for other in &others {
                assert!(!is_eventfd_by(links, other.as_fd()), "{links}: {other:?}");
            }
        }
        for other in &others {
            let refused = Signaller::new(other.as_fd()).err().unwrap();
            assert_eq!(refused.raw_os_error(), Some(libc::EINVAL));
        }
    }
}
