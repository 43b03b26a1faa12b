//! The driver's side of a split ring.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::atomic::fence;
use std::time::Duration;

use blockhouse_engine::{SharedMemory, VolatileSlice};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::GUEST;
use crate::ring::{DESCRIPTOR_BYTES, NEXT};

/// A descriptor to write: a buffer of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescriptorSpec {
    /// The guest's address.
    pub address: u64,
    /// Bytes.
    pub length: u32,
    /// Flags of the descriptor. [`NEXT`] is added automatically inside of a chain.
    pub flags: u16,
}

impl DescriptorSpec {
    /// A buffer at an offset in the shared memory.
    pub fn at(offset: usize, length: u32, flags: u16) -> Self {
        Self { address: GUEST + offset as u64, length, flags }
    }
}

/// One queue.
pub struct DriverQueue {
    entries: u16,
    start: usize,
    /// The descriptors.
    pub table: VolatileSlice,
    available: VolatileSlice,
    used: VolatileSlice,
    /// Notifies the device.
    pub kick: EventFd,
    /// Notified by the device.
    pub call: EventFd,
    /// Watches `call`.
    epoll: Epoll,
    event_index: bool,
    next_available: u16,
    published: u16,
    next_used: u16,
}

impl DriverQueue {
    /// Bytes of a queue's rings.
    pub(super) fn ring_bytes(entries: u16) -> usize {
        let entries = usize::from(entries);
        (DESCRIPTOR_BYTES * entries + 6 + 2 * entries).next_multiple_of(4096)
            + (6 + 8 * entries).next_multiple_of(4096)
    }

    fn parts(start: usize, entries: u16) -> [usize; 3] {
        let entries = usize::from(entries);
        let available = start + DESCRIPTOR_BYTES * entries;
        let used = (available + 6 + 2 * entries).next_multiple_of(4096);
        [start, available, used]
    }

    pub(super) fn new(
        memory: Arc<SharedMemory>,
        start: usize,
        entries: u16,
        event_index: bool,
    ) -> io::Result<Self> {
        let [table, available, used] = Self::parts(start, entries);
        let view = |offset, length| {
            VolatileSlice::new(Arc::clone(&memory), offset, length)
                .ok_or(io::ErrorKind::InvalidInput)
        };
        let count = usize::from(entries);
        let call = EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?;
        let epoll = Epoll::new()?;
        let input = EpollEvent::new(EventSet::IN, 0);
        epoll.ctl(ControlOperation::Add, call.as_raw_fd(), input)?;
        Ok(Self {
            entries,
            start,
            table: view(table, DESCRIPTOR_BYTES * count)?,
            available: view(available, 6 + 2 * count)?,
            used: view(used, 6 + 8 * count)?,
            kick: EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK)?,
            call,
            epoll,
            event_index,
            next_available: 0,
            published: 0,
            next_used: 0,
        })
    }

    /// Offsets of the table and the rings in the shared memory.
    pub(super) fn offsets(&self) -> [usize; 3] {
        Self::parts(self.start, self.entries)
    }

    /// The index at which the device continues by default: the number of the next used entry.
    pub(super) fn base(&self) -> u16 {
        self.next_used
    }

    /// Empties the rings, as a driver does when it resets its device.
    pub(super) fn reset(&mut self) {
        for ring in [&self.available, &self.used] {
            (0..ring.len()).for_each(|offset| ring.store_u8(offset, 0));
        }
        (self.next_available, self.published, self.next_used) = (0, 0, 0);
    }

    /// Writes one descriptor.
    pub fn describe(&self, index: u16, buffer: DescriptorSpec, next: u16) {
        write_descriptor(&self.table, index, buffer, next);
    }

    /// Writes a chain into consecutive descriptors from `head` on.
    pub fn chain(&self, head: u16, buffers: &[DescriptorSpec]) {
        write_chain(&self.table, head, buffers);
    }

    /// Adds a chain to the available ring, visible after [`publish`](Self::publish).
    pub fn add_available(&mut self, head: u16) {
        let slot = usize::from(self.next_available & (self.entries - 1));
        self.available.store_u16(4 + 2 * slot, head);
        self.next_available = self.next_available.wrapping_add(1);
    }

    /// Publishes the added chains, and kicks the device if it requested that.
    pub fn publish(&mut self) {
        let old = std::mem::replace(&mut self.published, self.next_available);
        self.available.store_u16(2, self.next_available);
        fence(SeqCst);
        let wanted = if self.event_index {
            let event = self.used.load_u16(4 + 8 * usize::from(self.entries), Relaxed);
            let (new, event) = (self.published, event);
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            self.used.load_u16(0, Relaxed) & 1 == 0
        };
        if wanted {
            // The write fails only if the counter is full; then a kick is pending anyway.
            let _ = self.kick.write(1);
        }
    }

    /// Publishes a nonsensical index.
    pub fn publish_index(&self, index: u16) {
        self.available.store_u16(2, index);
        let _ = self.kick.write(1);
    }

    /// The next completed request: its head, and the number of bytes written.
    pub fn next_used(&mut self) -> Option<(u16, u32)> {
        if self.used.load_u16(2, Acquire) == self.next_used {
            return None;
        }
        let slot = usize::from(self.next_used & (self.entries - 1));
        let (head, written) = (self.used.load_u32(4 + 8 * slot), self.used.load_u32(8 + 8 * slot));
        self.next_used = self.next_used.wrapping_add(1);
        Some((head as u16, written))
    }

    /// Enables notification of the next completed request. Returns whether there is one already.
    pub fn arm(&self) -> bool {
        if self.event_index {
            self.available.store_u16(4 + 2 * usize::from(self.entries), self.next_used);
        }
        fence(SeqCst);
        self.used.load_u16(2, Acquire) != self.next_used
    }

    /// Sleeps until the device sends a notification, a signal arrives, or `limit` has passed.
    /// Returns false after `limit`.
    pub fn sleep(&self, limit: Duration) -> bool {
        let limit = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX);
        let mut events = [EpollEvent::default()];
        let woken = match self.epoll.wait(limit, &mut events) {
            Ok(count) => count > 0,
            Err(error) => error.kind() == io::ErrorKind::Interrupted,
        };
        // An empty eventfd is no error.
        let _ = self.call.read();
        woken
    }

    /// Waits for the next completed request.
    pub fn wait_used(&mut self, limit: Duration) -> Option<(u16, u32)> {
        loop {
            if let Some(used) = self.next_used() {
                return Some(used);
            }
            if !self.arm() && !self.sleep(limit) {
                return self.next_used();
            }
        }
    }
}

/// Writes a chain into a table from descriptor `first` on.
pub fn write_chain(table: &VolatileSlice, first: u16, buffers: &[DescriptorSpec]) {
    for (index, buffer) in (first..).zip(buffers) {
        let is_last = usize::from(index - first) + 1 == buffers.len();
        let flags = buffer.flags | if is_last { 0 } else { NEXT };
        write_descriptor(table, index, DescriptorSpec { flags, ..*buffer }, index + 1);
    }
}

fn write_descriptor(table: &VolatileSlice, index: u16, buffer: DescriptorSpec, next: u16) {
    let at = DESCRIPTOR_BYTES * usize::from(index);
    let rest = u64::from(buffer.length) | u64::from(buffer.flags) << 32 | u64::from(next) << 48;
    table.store_u64(at, buffer.address);
    table.store_u64(at + 8, rest);
}
