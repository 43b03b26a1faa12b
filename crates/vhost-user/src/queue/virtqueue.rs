//! A queue's ring, with everything that is updated for each request: the in-flight log, the log of
//! changed pages, the notification of the driver.

use std::collections::VecDeque;
use std::sync::Arc;

use blockhouse_engine::{FaultDomain, GuestMemory};

use super::call::Call;
use super::dirty_log::DirtyLog;
use super::inflight::InflightQueue;
use crate::block::Status;
use crate::ring::{Broken, Chain, RingAddresses, SplitRing};

/// The used ring's index is updated after this many inline completions at the latest, so that a
/// running driver can process them in parallel.
const INDEX_INTERVAL: u16 = 4;

/// If at most this many requests are available, the driver is notified after each quarter of them,
/// so that it works in parallel. With more requests one notification covers more of them, because
/// waking a sleeping driver takes as long as several requests.
const FEW_REQUESTS: u16 = 16;

/// Maximum number of requests per notification of the driver.
const MAX_BATCH: u16 = 64;

/// Maximum bytes of the requests per notification, unless one request has more. Copying them takes
/// about 40 microseconds.
const MAX_BATCH_BYTES: u64 = 256 << 10;

/// The state of a queue in the memory of the guest or the front-end.
pub struct Virtqueue {
    ring: SplitRing,
    memory: Arc<GuestMemory>,
    /// The fault domain of the guest's memory, the ring and the in-flight log.
    domain: Arc<FaultDomain>,
    inflight: Option<InflightQueue>,
    /// The first descriptors of requests that an earlier server had begun.
    resubmit: VecDeque<u16>,
    call: Option<Call>,
    log: Option<DirtyLog>,
    /// The guest's address of the used ring, if its changes are logged.
    logged_used: Option<u64>,
    /// The eventfd that notifies the front-end of changes of the log, if the front-end sent one.
    log_call: Option<Call>,
    /// How many requests were completed since the driver was last notified.
    unsignalled: u16,
    unsignalled_bytes: u64,
    /// The number of inline completions after which the driver is notified.
    batch: u16,
}

/// Whether a request completed inline or asynchronously.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum CompletionKind {
    /// The request completed without waiting.
    Inline,
    /// The request waited, and other requests could run in between.
    Async,
}

/// A request that was popped from the ring.
pub struct Element {
    /// The index of the request's first descriptor.
    pub head: u16,
    /// The memory that the request's addresses refer to.
    pub memory: Arc<GuestMemory>,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The status for the guest.
    pub status: Status,
    /// The number of bytes of the request's writable buffers, from the first one on, that may have
    /// changed.
    pub written: u64,
}

impl Virtqueue {
    /// A ring in this memory, with the requests that an earlier server had begun.
    pub fn new(
        ring: SplitRing,
        memory: Arc<GuestMemory>,
        domain: Arc<FaultDomain>,
        inflight: Option<InflightQueue>,
        resubmit: Vec<u16>,
    ) -> Self {
        Self {
            ring,
            memory,
            domain,
            inflight,
            resubmit: resubmit.into(),
            call: None,
            log: None,
            logged_used: None,
            log_call: None,
            unsignalled: 0,
            unsignalled_bytes: 0,
            batch: 1,
        }
    }

    /// Whether some memory that was read so far was lost.
    pub fn has_lost_memory(&self) -> bool {
        self.domain.has_failed()
    }

    /// Checks that no memory that was read so far was lost.
    ///
    /// # Errors
    /// `MemoryLost` if some memory was lost.
    fn check_memory(&self) -> Result<(), Broken> {
        if self.has_lost_memory() { Err(Broken::MemoryLost) } else { Ok(()) }
    }

    /// Sets how the driver is notified, and notifies it, because the change may have lost a
    /// notification.
    pub fn set_call(&mut self, call: Option<Call>) {
        self.call = call;
        self.call.iter().for_each(Call::signal);
    }

    /// Sets the log, the used ring's address in it, and how the front-end is notified of changes.
    pub fn set_log(&mut self, log: Option<DirtyLog>, used: Option<u64>, call: Option<Call>) {
        (self.log, self.logged_used, self.log_call) = (log, used, call);
    }

    /// Moves the ring to other memory, or to other addresses.
    pub fn move_to(
        &mut self,
        memory: Arc<GuestMemory>,
        addresses: RingAddresses,
    ) -> Result<(), Broken> {
        self.ring.move_to(&memory, addresses)?;
        self.memory = memory;
        Ok(())
    }

    /// The maximum number of requests at once: the number of entries.
    pub fn entries(&self) -> usize {
        self.ring.size().into()
    }

    /// The number of the next available entry.
    pub fn last_avail_idx(&self) -> u16 {
        self.ring.last_avail_idx()
    }

    /// The number of requests that are known to be available without another read of the driver's
    /// index.
    pub fn cached_available(&self) -> usize {
        self.resubmit.len() + usize::from(self.ring.cached_available())
    }

    /// The number of available requests. If there are any, disables the driver's kicks.
    pub fn available(&mut self) -> Result<usize, Broken> {
        let count = usize::from(self.ring.update_avail_idx()?) + self.resubmit.len();
        if count > 0 && self.ring.disable_notify() {
            self.log_used(self.ring.notify_field_offset(), 2);
        }
        Ok(count)
    }

    /// Whether the driver has made requests available.
    pub fn has_available(&self) -> bool {
        self.ring.has_available()
    }

    /// Makes the driver kick from now on. Returns whether requests wait already.
    pub fn enable_notify(&mut self) -> bool {
        let stores = !self.ring.is_notify_enabled();
        let is_available = self.ring.enable_notify();
        if stores {
            self.log_used(self.ring.notify_field_offset(), 2);
        }
        is_available
    }

    /// Logs a change of `length` bytes of the used ring. This must follow the store, because
    /// otherwise a migration could clear the bit and copy the page before the store.
    fn log_used(&self, offset: usize, length: u64) {
        if let (Some(log), Some(used)) = (&self.log, self.logged_used)
            // The address is the front-end's; if the sum overflows, there is no page to mark.
            && let Some(address) = used.checked_add(offset as u64)
        {
            log.mark(address, length);
        }
    }

    /// Pops the next request, if there is one.
    pub fn pop(&mut self, chain: &mut Chain) -> Result<Option<Element>, Broken> {
        if let Some(element) = self.pop_resubmit(chain)? {
            return Ok(Some(element));
        }
        if self.ring.cached_available() == 0 {
            self.batch = batch_of(self.ring.update_avail_idx()?);
        }
        let Some(head) = self.ring.pop()? else { return Ok(None) };
        // The check comes before the entry in the in-flight log is made, because otherwise the next
        // server would execute a request that does not exist.
        self.check_memory()?;
        self.inflight.iter_mut().for_each(|inflight| inflight.begin(head));
        self.walk(head, chain).map(Some)
    }

    /// Pops the next request that an earlier server had begun, if one is left.
    pub fn pop_resubmit(&mut self, chain: &mut Chain) -> Result<Option<Element>, Broken> {
        let head = self.resubmit.pop_front();
        head.map(|head| self.walk(head, chain)).transpose()
    }

    /// How many requests that an earlier server had begun are left.
    pub fn left_to_resubmit(&self) -> usize {
        self.resubmit.len()
    }

    fn walk(&self, head: u16, chain: &mut Chain) -> Result<Element, Broken> {
        chain.walk(&self.memory, self.ring.descriptors(), head)?;
        self.check_memory()?;
        Ok(Element { head, memory: Arc::clone(&self.memory) })
    }

    /// Completes a request. One notification of the driver covers several requests.
    pub fn complete(
        &mut self,
        element: &Element,
        chain: &Chain,
        outcome: Outcome,
        kind: CompletionKind,
    ) {
        // The walk has checked that the status is in this memory, which the element keeps mapped.
        let _ = element.memory.write(chain.status(), &[outcome.status.byte()]);
        if let Some(log) = &self.log {
            log.mark(chain.status(), 1);
            log.mark_first(chain.writable(), outcome.written);
        }
        self.inflight.iter_mut().for_each(|inflight| inflight.end(element.head));
        let used_element = 4 + 8 * usize::from(self.ring.used_slot());
        self.ring.push_used(element.head, chain.writable_length());
        self.log_used(used_element, 8);
        self.unsignalled += 1;
        self.unsignalled_bytes += chain.length();
        let batch = match kind {
            CompletionKind::Inline => self.batch,
            // Other requests complete in the same iteration of the loop, and the ring task runs
            // after them. The storage works in parallel, so the driver should be able to submit
            // more soon.
            CompletionKind::Async => FEW_REQUESTS,
        };
        if self.unsignalled >= batch || self.unsignalled_bytes >= MAX_BATCH_BYTES {
            self.publish();
        } else if kind == CompletionKind::Inline && self.ring.unpublished() >= INDEX_INTERVAL {
            self.update_index();
        }
    }

    /// Whether requests were completed that the driver was not notified of.
    pub fn has_unsignalled(&self) -> bool {
        self.unsignalled > 0
    }

    /// Publishes completed requests, and notifies the driver if it requested that.
    pub fn publish(&mut self) {
        if self.unsignalled == 0 {
            return;
        }
        (self.unsignalled, self.unsignalled_bytes) = (0, 0);
        self.update_index();
        if self.ring.should_notify() {
            self.call.iter().for_each(Call::signal);
        }
        if self.log.is_some() {
            self.log_call.iter().for_each(Call::signal);
        }
    }

    fn update_index(&mut self) {
        self.ring.publish();
        self.log_used(2, 2);
        let last_used_idx = self.ring.last_used_idx();
        self.inflight.iter_mut().for_each(|inflight| inflight.published(last_used_idx));
    }
}

/// How many requests complete per notification of the driver when this many are available.
fn batch_of(count: u16) -> u16 {
    match count {
        ..=FEW_REQUESTS => (count / 4).max(1),
        _ => count.min(MAX_BATCH),
    }
}

#[cfg(test)]
mod tests;
