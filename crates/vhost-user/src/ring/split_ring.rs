//! The device's side of a split virtqueue (virtio 1.2, section 2.7).
//!
//! The driver may be hostile, and change its memory at any time. So each field is read once and
//! checked before use. No unchecked count or index of the driver determines the length of a loop or
//! the address of a store. Driver and device share three structures. After the device has read an
//! index (acquire), it sees everything that the driver stored before it published the index. The
//! driver sees the device's stores in the same way (release).

use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::atomic::{Ordering, fence};

use blockhouse_engine::{GuestMemory, VolatileSlice};

use super::broken::Broken;
use super::descriptor::{DESCRIPTOR_BYTES, MAX_ENTRIES};

/// In the available ring's flags: the driver needs no notification (`VRING_AVAIL_F_NO_INTERRUPT`).
const AVAIL_F_NO_INTERRUPT: u16 = 1;

/// In the used ring's flags: the device needs no notification (`VRING_USED_F_NO_NOTIFY`).
const USED_F_NO_NOTIFY: u16 = 1;

/// The parts of a queue, in the guest's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingAddresses {
    /// The descriptor table.
    pub descriptors: u64,
    /// The available ring, which the driver writes.
    pub available: u64,
    /// The used ring, which the device writes.
    pub used: u64,
}

/// Whether `VIRTIO_RING_F_EVENT_IDX` was negotiated. If so, each side publishes the index from
/// which on it requests notifications.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventIndex {
    /// The feature was negotiated.
    Negotiated,
    /// The feature was not negotiated, so each side has a flag.
    Absent,
}

/// The device's side of one queue.
pub struct SplitRing {
    size: u16,
    event_index: EventIndex,
    descriptors: VolatileSlice,
    available: VolatileSlice,
    used: VolatileSlice,
    /// The number of the next available entry.
    last_avail_idx: u16,
    /// The driver's index of the available ring, as it was read last.
    avail_idx: u16,
    /// The number of the next used entry.
    last_used_idx: u16,
    /// The index of the used ring as it was published last.
    published_used_idx: u16,
    /// The published index at the last call of [`should_notify`](Self::should_notify).
    signalled_used: Option<u16>,
    /// The entry for which the device has enabled notifications.
    avail_event: Option<u16>,
}

impl SplitRing {
    /// The queue at `addresses`, whose next available entry is number `last_avail_idx`. The number
    /// of its next used entry is read from the guest's memory.
    ///
    /// # Errors
    /// A size that is not allowed, or an address that is misaligned or not in the memory.
    pub fn new(
        memory: &GuestMemory,
        addresses: RingAddresses,
        size: u16,
        last_avail_idx: u16,
        event_index: EventIndex,
    ) -> Result<Self, Broken> {
        let (descriptors, available, used) = views(memory, addresses, size)?;
        let last_used_idx = used.load_u16(2, Relaxed);
        Ok(Self {
            size,
            event_index,
            descriptors,
            available,
            used,
            last_avail_idx,
            avail_idx: last_avail_idx,
            last_used_idx,
            published_used_idx: last_used_idx,
            signalled_used: None,
            avail_event: None,
        })
    }

    /// Whether a queue of this size could be at `addresses`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn check(memory: &GuestMemory, addresses: RingAddresses, size: u16) -> Result<(), Broken> {
        views(memory, addresses, size).map(|_| ())
    }

    /// Finds the queue's parts again after the guest's memory has changed.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn move_to(
        &mut self,
        memory: &GuestMemory,
        addresses: RingAddresses,
    ) -> Result<(), Broken> {
        (self.descriptors, self.available, self.used) = views(memory, addresses, self.size)?;
        self.avail_event = None;
        Ok(())
    }

    /// The number of entries.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The table of descriptors.
    pub fn descriptors(&self) -> &VolatileSlice {
        &self.descriptors
    }

    /// The number of the next available entry.
    pub fn last_avail_idx(&self) -> u16 {
        self.last_avail_idx
    }

    /// The number of the next used entry.
    pub fn last_used_idx(&self) -> u16 {
        self.last_used_idx
    }

    /// The index in the used ring of the next used entry.
    pub fn used_slot(&self) -> u16 {
        self.last_used_idx & (self.size - 1)
    }

    /// How many entries are available as of the last [`update_avail_idx`](Self::update_avail_idx).
    pub fn cached_available(&self) -> u16 {
        self.avail_idx.wrapping_sub(self.last_avail_idx)
    }

    /// Reads the driver's index again. Returns how many entries are available.
    ///
    /// # Errors
    /// More entries are available than the queue has.
    pub fn update_avail_idx(&mut self) -> Result<u16, Broken> {
        let avail_idx = self.available.load_u16(2, Acquire);
        let count = avail_idx.wrapping_sub(self.last_avail_idx);
        if count > self.size {
            return Err(Broken::TooManyAvailable(count, self.size));
        }
        self.avail_idx = avail_idx;
        Ok(count)
    }

    /// Pops the next of the [cached](Self::cached_available) entries: the index of its first
    /// descriptor.
    ///
    /// # Errors
    /// The table does not have that descriptor.
    pub fn pop(&mut self) -> Result<Option<u16>, Broken> {
        if self.cached_available() == 0 {
            return Ok(None);
        }
        let slot = usize::from(self.last_avail_idx & (self.size - 1));
        let head = self.available.load_u16(4 + 2 * slot, Relaxed);
        if head >= self.size {
            return Err(Broken::NoSuchDescriptor(head, self.size.into()));
        }
        self.last_avail_idx = self.last_avail_idx.wrapping_add(1);
        Ok(Some(head))
    }

    /// Puts an entry into the used ring. The driver sees it after [`publish`](Self::publish).
    pub fn push_used(&mut self, head: u16, written: u32) {
        let slot = usize::from(self.used_slot());
        self.used.store_u32(4 + 8 * slot, head.into());
        self.used.store_u32(8 + 8 * slot, written);
        self.last_used_idx = self.last_used_idx.wrapping_add(1);
    }

    /// How many used entries the driver cannot see yet.
    pub fn unpublished(&self) -> u16 {
        self.last_used_idx.wrapping_sub(self.published_used_idx)
    }

    /// Publishes the used entries.
    pub fn publish(&mut self) {
        self.used.store_u16(2, self.last_used_idx);
        self.published_used_idx = self.last_used_idx;
    }

    /// Whether the driver needs a notification of the entries published since the last call.
    pub fn should_notify(&mut self) -> bool {
        // The driver writes `used_event` (or its flag), then reads the used index; the device
        // writes the used index, then reads `used_event`. With a full fence on both sides, at least
        // one side sees the other's write.
        fence(Ordering::SeqCst);
        match self.event_index {
            EventIndex::Absent => self.available.load_u16(0, Relaxed) & AVAIL_F_NO_INTERRUPT == 0,
            EventIndex::Negotiated => {
                let event = self.available.load_u16(4 + 2 * usize::from(self.size), Relaxed);
                let old = self.signalled_used.replace(self.published_used_idx);
                old.is_none_or(|old| need_event(event, old, self.published_used_idx))
            }
        }
    }

    /// Whether the driver has published entries that were not popped.
    pub fn has_available(&self) -> bool {
        self.available.load_u16(2, Relaxed) != self.last_avail_idx
    }

    /// Requests a notification of the next entry from the driver. Returns whether entries are
    /// available already.
    pub fn enable_notify(&mut self) -> bool {
        if self.is_notify_enabled() {
            return self.has_available();
        }
        match self.event_index {
            EventIndex::Absent => self.used.store_u16(0, 0),
            EventIndex::Negotiated => {
                self.used.store_u16(self.notify_field_offset(), self.last_avail_idx)
            }
        }
        self.avail_event = Some(self.last_avail_idx);
        // As in `should_notify`, with the sides swapped: the device writes `avail_event` (or its
        // flag), then reads the available index.
        fence(Ordering::SeqCst);
        self.has_available()
    }

    /// Whether [`enable_notify`](Self::enable_notify) has nothing to store.
    pub fn is_notify_enabled(&self) -> bool {
        self.avail_event == Some(self.last_avail_idx)
    }

    /// Disables notifications until [`enable_notify`](Self::enable_notify). Returns whether it has
    /// stored a flag in the used ring.
    #[must_use]
    pub fn disable_notify(&mut self) -> bool {
        // An event index requests a notification for one entry only.
        let stores = self.avail_event.take().is_some() && self.event_index == EventIndex::Absent;
        if stores {
            self.used.store_u16(0, USED_F_NO_NOTIFY);
        }
        stores
    }

    /// The offset in the used ring of the field that enables notifications: the flags, or
    /// `avail_event`.
    pub fn notify_field_offset(&self) -> usize {
        match self.event_index {
            EventIndex::Absent => 0,
            EventIndex::Negotiated => 4 + 8 * usize::from(self.size),
        }
    }
}

/// Whether `event` lies in `old..new`, modulo 2^16 (`vring_need_event` of virtio 1.2, section
/// 2.7.7.2).
fn need_event(event: u16, old: u16, new: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

fn views(
    memory: &GuestMemory,
    addresses: RingAddresses,
    size: u16,
) -> Result<(VolatileSlice, VolatileSlice, VolatileSlice), Broken> {
    if !size.is_power_of_two() || size > MAX_ENTRIES {
        return Err(Broken::Size(size));
    }
    let size = usize::from(size);
    let part = |name, address, length, alignment| {
        let view = memory.view(address, length).filter(|view| view.is_aligned(alignment));
        view.ok_or(Broken::Misplaced(name, address))
    };
    // The available ring ends with `used_event`, the used ring with `avail_event`, negotiated or
    // not. The alignments are those of virtio 1.2, section 2.7.
    Ok((
        part("descriptor table", addresses.descriptors, DESCRIPTOR_BYTES * size, 16)?,
        part("available ring", addresses.available, 6 + 2 * size, 2)?,
        part("used ring", addresses.used, 6 + 8 * size, 4)?,
    ))
}
