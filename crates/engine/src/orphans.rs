//! Durable operations whose waiter is gone.
//!
//! The host reports each failure to make data durable once. When the future that waited for a flush
//! or a durable write is dropped, its outcome must not be lost: the next flush of the file waits
//! until such operations have ended, and fails if one of them did.

use std::future::poll_fn;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::task::{Poll, Waker};

use parking_lot::Mutex;
use rustix::io::Errno;

/// The orphans of one file.
#[derive(Default)]
pub(crate) struct Orphans {
    running: AtomicUsize,
    /// The errno of one that failed and was not reported yet, or 0.
    failure: AtomicI32,
    waiting: Mutex<Vec<Waker>>,
}

impl Orphans {
    /// Notes that nobody waits for an operation any more.
    pub(crate) fn adopt(&self) {
        self.running.fetch_add(1, Ordering::AcqRel);
    }

    /// Notes the end of an adopted operation. The result is the kernel's. A write whose memory is gone
    /// (EFAULT) made nothing durable, and lost nothing that was.
    pub(crate) fn bury(&self, result: i32) {
        if result < 0 && result != -libc::EFAULT {
            self.failure.store(-result, Ordering::Release);
        }
        let mut waiting = self.waiting.lock();
        if self.running.fetch_sub(1, Ordering::AcqRel) == 1 {
            waiting.drain(..).for_each(Waker::wake);
        }
    }

    /// Waits until none is left that was adopted before the call.
    pub(crate) async fn gone(&self) {
        poll_fn(|cx| {
            if self.running.load(Ordering::Acquire) == 0 {
                return Poll::Ready(());
            }
            let mut waiting = self.waiting.lock();
            // Again, under the lock that `bury` takes before it counts down.
            if self.running.load(Ordering::Acquire) == 0 {
                return Poll::Ready(());
            }
            waiting.push(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// The failure that nobody was told of yet.
    pub(crate) fn take_failure(&self) -> Result<(), Errno> {
        match self.failure.swap(0, Ordering::AcqRel) {
            0 => Ok(()),
            code => Err(Errno::from_raw_os_error(code)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_reported_once() {
        let orphans = Orphans::default();
        orphans.adopt();
        orphans.adopt();
        orphans.bury(-5);
        orphans.bury(4096);
        orphans.adopt();
        orphans.bury(-libc::EFAULT);
        futures_executor::block_on(orphans.gone());
        assert_eq!(orphans.take_failure(), Err(Errno::IO));
        assert_eq!(orphans.take_failure(), Ok(()));
    }

    #[test]
    fn a_flush_waits_for_the_last_one() {
        let orphans = std::sync::Arc::new(Orphans::default());
        orphans.adopt();
        let other = std::sync::Arc::clone(&orphans);
        let thread = std::thread::spawn(move || futures_executor::block_on(other.gone()));
        std::thread::sleep(std::time::Duration::from_millis(5));
        assert!(!thread.is_finished());
        orphans.bury(0);
        thread.join().unwrap();
    }
}
