//! Syncs and durable writes whose future was dropped.
//!
//! The host reports each failure to make data durable once (`errseq_t` in Linux). When the future
//! of a sync or a durable write is dropped, the operation is *detached*: it continues, and its
//! outcome must not be lost. The next flush of the file waits until all detached operations have
//! completed, and fails if one failed.

use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use blockhouse_core::sync::Condvar;
use rustix::io::Errno;

/// The detached operations of one file.
#[derive(Default)]
pub(crate) struct DetachedSyncs {
    in_flight: AtomicUsize,
    /// The errno of a failed operation that was not reported yet, or 0.
    failure: AtomicI32,
    completed: Condvar,
}

impl DetachedSyncs {
    /// The future of an operation was dropped.
    pub(crate) fn detach(&self) {
        self.in_flight.fetch_add(1, Ordering::AcqRel);
    }

    /// A detached operation has completed with the kernel's `result`. A write whose memory is lost
    /// (EFAULT) made nothing durable, and lost no durable data.
    pub(crate) fn complete(&self, result: i32) {
        if result < 0 && result != -libc::EFAULT {
            self.failure.store(-result, Ordering::Release);
        }
        if self.in_flight.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.completed.notify_all();
        }
    }

    /// Waits until no detached operation is in flight.
    pub(crate) async fn drained(&self) {
        let is_drained = || (self.in_flight.load(Ordering::Acquire) == 0).then_some(());
        self.completed.wait_until(is_drained).await;
    }

    /// The failure that was not reported yet; it is reported once.
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
        let syncs = DetachedSyncs::default();
        syncs.detach();
        syncs.detach();
        syncs.complete(-5);
        syncs.complete(4096);
        syncs.detach();
        syncs.complete(-libc::EFAULT);
        futures_executor::block_on(syncs.drained());
        assert_eq!(syncs.take_failure(), Err(Errno::IO));
        assert_eq!(syncs.take_failure(), Ok(()));
    }

    #[test]
    fn a_flush_waits_for_the_last_one() {
        let syncs = std::sync::Arc::new(DetachedSyncs::default());
        syncs.detach();
        let other = std::sync::Arc::clone(&syncs);
        let thread = std::thread::spawn(move || futures_executor::block_on(other.drained()));
        std::thread::sleep(std::time::Duration::from_millis(5));
        assert!(!thread.is_finished());
        syncs.complete(0);
        thread.join().unwrap();
    }
}
