//! A split virtqueue as the device sees it (virtio 1.2, section 2.7).
//!
//! The driver may be hostile and changes its memory at any time. So everything is read once, what is
//! read is checked before it is used, and no count or index of the driver's decides how long a loop
//! runs or where something is stored. The two ends share three structures and an order of accesses:
//! what the driver stored before it published an index is seen by whoever read that index (acquire),
//! and the other way round (release).

use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::atomic::{Ordering, fence};

use blockhouse_engine::{GuestMemory, View};

/// The most entries that a queue may have; QEMU's limit as well.
pub const MAX_ENTRIES: u16 = 1024;

/// A descriptor is followed by another one; its buffer is for the device to write; its buffer is a
/// table of descriptors (`VRING_DESC_F_*`).
pub const NEXT: u16 = 1;
/// See [`NEXT`].
pub const WRITE: u16 = 2;
/// See [`NEXT`].
pub const INDIRECT: u16 = 4;

/// Bytes of a descriptor.
pub const DESCRIPTOR: usize = 16;

/// `VRING_AVAIL_F_NO_INTERRUPT` and `VRING_USED_F_NO_NOTIFY`.
const SILENT: u16 = 1;

/// Where the driver has put a queue, in the guest's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// The descriptor table.
    pub descriptors: u64,
    /// What the driver makes available.
    pub available: u64,
    /// What the device has used.
    pub used: u64,
}

/// Whether the two ends tell each other from which index on they want to be notified
/// (`VIRTIO_RING_F_EVENT_IDX`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventIndex {
    /// They do.
    Negotiated,
    /// They have a flag each.
    Absent,
}

/// The driver did something that makes its queue unusable.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    /// A queue of a size that virtio does not allow, or that is too large.
    #[error("a queue of {0} entries; it must be a power of two up to {MAX_ENTRIES}")]
    Size(u16),
    /// A part of a queue that is not in the guest's memory.
    #[error("the {0} at {1:#x} is not in the guest's memory, or misaligned")]
    Misplaced(&'static str, u64),
    /// More entries at once than the queue has.
    #[error("{0} requests made available at once in a queue of {1}")]
    TooManyAvailable(u16, u16),
    /// A descriptor that the table does not have.
    #[error("descriptor {0} of a table of {1}")]
    NoSuchDescriptor(u16, usize),
    /// A chain that is longer than any may be, or goes round.
    #[error("a chain of more than {0} descriptors")]
    Endless(usize),
    /// An indirect table inside of another, or together with `NEXT` or `WRITE`.
    #[error("an indirect table that virtio does not allow: flags {0:#x}, {1} bytes")]
    Indirect(u16, u32),
    /// Memory that the front-end shares has vanished: what was read from it is worth nothing.
    #[error("memory that the front-end shares has vanished")]
    MemoryLost,
    /// No byte for the outcome, so that nobody can be told.
    #[error("a request without a place for its status")]
    NoStatus,
}

/// One descriptor, read once.
#[derive(Clone, Copy, Debug)]
pub struct Descriptor {
    /// The guest's address of the buffer.
    pub address: u64,
    /// Bytes of the buffer.
    pub length: u32,
    /// [`NEXT`], [`WRITE`], [`INDIRECT`].
    pub flags: u16,
    /// The next one's index, with `NEXT`.
    pub next: u16,
}

impl Descriptor {
    /// Reads the descriptor at `index` of a table, which has it.
    pub fn read(table: &View, index: usize) -> Self {
        let at = index * DESCRIPTOR;
        let (address, rest) = if table.is_aligned(8) {
            (table.load_u64(at), table.load_u64(at + 8))
        } else {
            // An indirect table may be anywhere.
            let half = |at| {
                let mut bytes = [0; 8];
                table.read(at, &mut bytes);
                u64::from_le_bytes(bytes)
            };
            (half(at), half(at + 8))
        };
        let (length, flags, next) = (rest as u32, (rest >> 32) as u16, (rest >> 48) as u16);
        Self { address, length, flags, next }
    }
}

/// The device's side of one queue.
pub struct Ring {
    size: u16,
    event_index: EventIndex,
    descriptors: View,
    available: View,
    used: View,
    /// Which available entry is next.
    next_available: u16,
    /// Up to which entry the driver is known to have published.
    published: u16,
    /// Which used entry is next, and up to which the driver was told.
    next_used: u16,
    told_used: u16,
    /// Up to which used entry the driver's wish to be notified was asked.
    asked: Option<u16>,
    /// From which entry on the driver notifies us, if it does.
    armed: Option<u16>,
}

impl Ring {
    /// The queue at `addresses`, whose next available entry is number `next_available`. Where the
    /// used entries go on is in the guest's memory.
    ///
    /// # Errors
    /// A size that is not allowed, or a place that is not there.
    pub fn new(
        memory: &GuestMemory,
        addresses: Addresses,
        size: u16,
        next_available: u16,
        event_index: EventIndex,
    ) -> Result<Self, Broken> {
        if !size.is_power_of_two() || size > MAX_ENTRIES {
            return Err(Broken::Size(size));
        }
        let (descriptors, available, used) = views(memory, addresses, size)?;
        let next_used = used.load_u16(2, Relaxed);
        Ok(Self {
            size,
            event_index,
            descriptors,
            available,
            used,
            next_available,
            published: next_available,
            next_used,
            told_used: next_used,
            asked: None,
            armed: None,
        })
    }

    /// Whether a queue of this size could be at `addresses`.
    ///
    /// # Errors
    /// A place that is not there.
    pub fn check(memory: &GuestMemory, addresses: Addresses, size: u16) -> Result<(), Broken> {
        views(memory, addresses, size).map(|_| ())
    }

    /// Finds the queue's parts again after the guest's memory has changed.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn move_to(&mut self, memory: &GuestMemory, addresses: Addresses) -> Result<(), Broken> {
        (self.descriptors, self.available, self.used) = views(memory, addresses, self.size)?;
        self.armed = None;
        Ok(())
    }

    /// How many entries it has.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The table of descriptors.
    pub fn descriptors(&self) -> &View {
        &self.descriptors
    }

    /// The number of the next available entry.
    pub fn next_available(&self) -> u16 {
        self.next_available
    }

    /// The number of the next used entry.
    pub fn next_used(&self) -> u16 {
        self.next_used
    }

    /// The index in the used ring of the next used entry.
    pub fn used_slot(&self) -> u16 {
        self.next_used & (self.size - 1)
    }

    /// How many entries are known to be available without looking.
    pub fn known(&self) -> u16 {
        self.published.wrapping_sub(self.next_available)
    }

    /// Looks how many entries are available.
    ///
    /// # Errors
    /// When there are more than the queue has.
    pub fn look(&mut self) -> Result<u16, Broken> {
        let published = self.available.load_u16(2, Acquire);
        let count = published.wrapping_sub(self.next_available);
        if count > self.size {
            return Err(Broken::TooManyAvailable(count, self.size));
        }
        self.published = published;
        Ok(count)
    }

    /// Takes the next entry that is [known](Self::known): the index of its first descriptor.
    ///
    /// # Errors
    /// When the table does not have that descriptor.
    pub fn pop(&mut self) -> Result<Option<u16>, Broken> {
        if self.known() == 0 {
            return Ok(None);
        }
        let slot = usize::from(self.next_available & (self.size - 1));
        let head = self.available.load_u16(4 + 2 * slot, Relaxed);
        if head >= self.size {
            return Err(Broken::NoSuchDescriptor(head, self.size.into()));
        }
        self.next_available = self.next_available.wrapping_add(1);
        Ok(Some(head))
    }

    /// Puts an entry into the used ring. The driver sees it after [`publish`](Self::publish).
    pub fn push_used(&mut self, head: u16, written: u32) {
        let slot = usize::from(self.used_slot());
        self.used.store_u32(4 + 8 * slot, head.into());
        self.used.store_u32(8 + 8 * slot, written);
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// How many used entries are not published.
    pub fn unpublished(&self) -> u16 {
        self.next_used.wrapping_sub(self.told_used)
    }

    /// Publishes the used entries.
    pub fn publish(&mut self) {
        self.used.store_u16(2, self.next_used);
        self.told_used = self.next_used;
    }

    /// Whether the driver wants to be notified of what was published since the last time that this
    /// was asked.
    pub fn wants_notification(&mut self) -> bool {
        // The driver stores its wish, then looks at the index; we the other way round.
        fence(Ordering::SeqCst);
        match self.event_index {
            EventIndex::Absent => self.available.load_u16(0, Relaxed) & SILENT == 0,
            EventIndex::Negotiated => {
                let event = self.available.load_u16(4 + 2 * usize::from(self.size), Relaxed);
                let old = self.asked.replace(self.told_used);
                old.is_none_or(|old| is_passed(event, old, self.told_used))
            }
        }
    }

    /// Whether the driver has published something else than was taken.
    pub fn has_news(&self) -> bool {
        self.available.load_u16(2, Relaxed) != self.next_available
    }

    /// Asks the driver for a notification of the next entry. Says whether entries are there already.
    pub fn arm(&mut self) -> bool {
        if self.is_armed() {
            return self.has_news();
        }
        match self.event_index {
            EventIndex::Absent => self.used.store_u16(0, 0),
            EventIndex::Negotiated => self.used.store_u16(self.wish_offset(), self.next_available),
        }
        self.armed = Some(self.next_available);
        // We store our wish, then look at the index; the driver the other way round.
        fence(Ordering::SeqCst);
        self.has_news()
    }

    /// Whether [`arm`](Self::arm) has nothing to store.
    pub fn is_armed(&self) -> bool {
        self.armed == Some(self.next_available)
    }

    /// Needs no notification any more, until [`arm`](Self::arm). Says whether that was stored in the used
    /// ring.
    #[must_use]
    pub fn disarm(&mut self) -> bool {
        // With event indices the wish was for one entry only.
        let stores = self.armed.take().is_some() && self.event_index == EventIndex::Absent;
        if stores {
            self.used.store_u16(0, SILENT);
        }
        stores
    }

    /// Where in the used ring the device's wish for notifications is.
    pub fn wish_offset(&self) -> usize {
        match self.event_index {
            EventIndex::Absent => 0,
            EventIndex::Negotiated => 4 + 8 * usize::from(self.size),
        }
    }
}

/// Whether going from `old` to `new` passes the index after `event` (`vring_need_event` of virtio 1.2,
/// section 2.7.7.2).
fn is_passed(event: u16, old: u16, new: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

fn views(
    memory: &GuestMemory,
    addresses: Addresses,
    size: u16,
) -> Result<(View, View, View), Broken> {
    let size = usize::from(size);
    let part = |name, address, length, alignment| {
        let view = memory.view(address, length).filter(|view| view.is_aligned(alignment));
        view.ok_or(Broken::Misplaced(name, address))
    };
    // Each ring ends with the other end's event index, negotiated or not. The alignments are those
    // of virtio 1.2, section 2.7.
    Ok((
        part("descriptor table", addresses.descriptors, DESCRIPTOR * size, 16)?,
        part("available ring", addresses.available, 6 + 2 * size, 2)?,
        part("used ring", addresses.used, 6 + 8 * size, 4)?,
    ))
}
