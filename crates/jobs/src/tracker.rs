//! What the guest changes while its disk is copied.
//!
//! In the background mode a change makes its granules dirty, after it was carried out. In the write-blocking mode it
//! waits until the copier has copied its bytes: nothing becomes dirty, so the copy converges. Either way the guest's
//! request touches nothing but its own disk: the copier alone writes to the target, and its errors are not the guest's.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blockhouse_core::ByteRange;
use blockhouse_disk::{ChangeObserver, ChangeWait, DirtyMap};
use futures_channel::oneshot;
use parking_lot::Mutex;

use crate::control::JobControl;

/// Observes the disk that is copied.
pub(crate) struct Tracker {
    dirty: DirtyMap,
    control: Arc<JobControl>,
    is_blocking: AtomicBool,
    /// Changes that wait for their copy; `None` in the background mode.
    urgent: Mutex<Option<VecDeque<UrgentCopy>>>,
}

/// Bytes that a guest's request waits for.
pub(crate) struct UrgentCopy {
    pub(crate) range: ByteRange,
    /// Dropped or sent to: the request goes on.
    pub(crate) done: oneshot::Sender<()>,
}

impl Tracker {
    pub(crate) fn new(dirty: DirtyMap, control: Arc<JobControl>) -> Arc<Self> {
        let (is_blocking, urgent) = (AtomicBool::new(false), Mutex::new(None));
        Arc::new(Self { dirty, control, is_blocking, urgent })
    }

    /// What is to be copied.
    pub(crate) fn dirty(&self) -> &DirtyMap {
        &self.dirty
    }

    /// Has changes wait for their copy from now on.
    pub(crate) fn block_writes(&self) {
        self.urgent.lock().get_or_insert_default();
        self.is_blocking.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_blocking(&self) -> bool {
        self.is_blocking.load(Ordering::SeqCst)
    }

    /// Has no change wait any more: those that do go on, and what they wait for is dirty.
    pub(crate) fn release_writes(&self) {
        self.is_blocking.store(false, Ordering::SeqCst);
        let waiting = self.urgent.lock().take();
        for UrgentCopy { range, done } in waiting.into_iter().flatten() {
            self.dirty.mark(range);
            drop(done);
        }
    }

    /// The first change that waits and that `is_free` admits.
    pub(crate) fn next_urgent(&self, is_free: impl Fn(ByteRange) -> bool) -> Option<UrgentCopy> {
        if !self.is_blocking() {
            return None;
        }
        let mut urgent = self.urgent.lock();
        let queue = urgent.as_mut()?;
        let index = queue.iter().position(|copy| is_free(copy.range))?;
        queue.remove(index)
    }

    /// Whether no change waits.
    pub(crate) fn is_quiet(&self) -> bool {
        self.urgent.lock().as_ref().is_none_or(VecDeque::is_empty)
    }

    fn wait_for_copy(&self, range: ByteRange) -> Option<ChangeWait> {
        let (done, copied) = oneshot::channel();
        self.urgent.lock().as_mut()?.push_back(UrgentCopy { range, done });
        self.control.changed().notify_all();
        Some(Box::pin(async move {
            // Dropped where the job ends: the request goes on all the same.
            let _ = copied.await;
        }))
    }
}

impl ChangeObserver for Tracker {
    fn completed(&self, range: ByteRange) -> Option<ChangeWait> {
        if range.is_empty() {
            return None;
        }
        let wait = if self.is_blocking() { self.wait_for_copy(range) } else { None };
        if wait.is_none() {
            self.dirty.mark(range);
        }
        wait
    }

    fn abandoned(&self, range: ByteRange) {
        self.dirty.mark(range);
    }
}
