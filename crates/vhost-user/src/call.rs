//! How a driver is notified: an eventfd that the front-end sent.

use std::io;
use std::os::fd::OwnedFd;

use blockhouse_engine::is_eventfd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl};

/// An eventfd to signal.
pub struct Call {
    descriptor: OwnedFd,
    /// Whether a signal would block while the counter is full. The descriptor's flags are shared with
    /// the front-end, so they are not ours to change.
    may_block: bool,
}

impl Call {
    /// Takes an eventfd over.
    ///
    /// # Errors
    /// `InvalidInput` when it is something else.
    pub fn new(descriptor: OwnedFd) -> io::Result<Self> {
        if !is_eventfd(&descriptor) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "this is no eventfd"));
        }
        let may_block = !fcntl_getfl(&descriptor)?.contains(OFlags::NONBLOCK);
        Ok(Self { descriptor, may_block })
    }

    /// Signals it. Where the counter is full, whoever reads it has a signal waiting anyhow.
    pub fn signal(&self) {
        if !(self.may_block && self.is_full()) {
            let _ = rustix::io::write(&self.descriptor, &1u64.to_ne_bytes());
        }
    }

    fn is_full(&self) -> bool {
        let mut descriptors = [PollFd::new(&self.descriptor, PollFlags::OUT)];
        poll(&mut descriptors, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn a_full_counter_does_not_block() {
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let call = Call::new(event.try_clone().unwrap()).unwrap();
        call.signal();
        let mut count = [0; 8];
        rustix::io::read(&event, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), u64::MAX - 1);
        call.signal();
        rustix::io::read(&event, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 1);
    }

    #[test]
    fn other_descriptors_are_refused() {
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(Call::new(socket.into()).is_err());
    }
}
