//! A guest's memory in a ring's own table (`IORING_REGISTER_BUFFERS2`): the kernel finds and pins
//! its pages once instead of for each request.
//!
//! Memory is divided into buffers, because the kernel accepts at most 1 GiB for a slot. A request
//! whose bytes lie in one buffer names the slot; any other request does not use the table.
//!
//! Guarantees (they uphold invariant 3, ARCHITECTURE.md):
//! - A buffer is found by address, and is the memory that the request means: the request owns the
//!   mapping that its address is in, the table owns the mapping of each of its slots, and two
//!   mappings that exist have no address in common. So an address is not given to other memory
//!   while a slot names it.
//! - A slot is emptied only after the last user of the memory was dropped. Each request is a user
//!   of its memory, so the last request has completed by then. No request finds an empty slot or
//!   other memory there.

use std::io;
use std::ptr;
use std::sync::Arc;

use blockhouse_core::{IoVector, Segment};
use io_uring::Submitter;

use crate::driver::registrations::{Registrations, Unregister};
use crate::mapping::Mapping;

/// Slots of one ring: enough for 4 TiB of memory, less 1 GiB for each slot that is reserved for
/// pages of the kernel. They take 8 bytes each, once there is memory to register.
const SLOTS: u16 = 4096;

/// Maximum bytes that the kernel accepts for one slot (`SZ_1G` in io_uring's `rsrc.c`).
const MAX_SLOT_BYTES: usize = 1 << 30;

/// Maximum bytes that the kernel accepts for one request in several segments of a slot
/// (`MAX_RW_COUNT`). Without a slot, the kernel carries out only the beginning of a longer request.
const MAX_VECTORED_BYTES: usize = 0x7fff_f000;

/// Memory in one slot.
struct BufferSlot {
    start: usize,
    end: usize,
    slot: u16,
    mapping: Arc<Mapping>,
}

impl BufferSlot {
    fn has(&self, segment: &Segment) -> bool {
        let start = segment.address.addr().get();
        self.start <= start && segment.length <= self.end.saturating_sub(start)
    }
}

/// The table of one ring.
pub(crate) struct BufferTable {
    owner: Arc<dyn Unregister<Mapping>>,
    /// Whether the kernel has a table for this ring.
    exists: bool,
    /// The buffers, by ascending address. They do not overlap.
    buffers: Vec<BufferSlot>,
    free: Vec<u16>,
}

impl BufferTable {
    /// The table of a ring of the loop `owner`. It allocates nothing before the first memory.
    pub(crate) fn new(owner: Arc<dyn Unregister<Mapping>>) -> Self {
        Self { owner, exists: false, buffers: Vec::new(), free: Vec::new() }
    }

    /// Puts all memory without a slot into slots. On an error, the memory that is left is used
    /// without a slot.
    ///
    /// # Errors
    /// The kernel's error: it is too old for such tables (before 5.19), cannot pin memory of this
    /// kind, or may not pin as much (`ENOMEM`, for `RLIMIT_MEMLOCK`); or `ENOSPC` for a table that
    /// is full.
    pub(crate) fn add(
        &mut self,
        ring: &Submitter<'_>,
        memory: &Registrations<Mapping>,
    ) -> io::Result<()> {
        self.create(ring)?;
        let mapping = memory.resource();
        if !self.buffers.iter().any(|buffer| Arc::ptr_eq(&buffer.mapping, mapping)) {
            memory.add(&self.owner);
        }
        for (start, length) in slots_of(mapping.start().addr().get(), mapping.length()) {
            let index = self.buffers.partition_point(|buffer| buffer.start < start);
            if self.buffers.get(index).is_some_and(|buffer| buffer.start == start) {
                continue;
            }
            let full = || io::Error::from_raw_os_error(libc::ENOSPC);
            let slot = *self.free.last().ok_or_else(full)?;
            let address = mapping.start().as_ptr().with_addr(start);
            // SAFETY: the range is inside of the mapping, which the table keeps until it has
            // emptied the slot.
            unsafe { fill(ring, slot, address, length)? };
            self.free.pop();
            let buffer =
                BufferSlot { start, end: start + length, slot, mapping: Arc::clone(mapping) };
            self.buffers.insert(index, buffer);
        }
        Ok(())
    }

    fn create(&mut self, ring: &Submitter<'_>) -> io::Result<()> {
        if !self.exists {
            ring.register_buffers_sparse(SLOTS.into())?;
            self.exists = true;
            self.free.extend((0..SLOTS).rev());
        }
        Ok(())
    }

    /// Takes slots that get no memory from here. See [`Driver::reserve_slots`].
    ///
    /// [`Driver::reserve_slots`]: crate::driver::Driver::reserve_slots
    pub(crate) fn reserve(&mut self, ring: &Submitter<'_>, count: u16) -> io::Result<Vec<u16>> {
        self.create(ring)?;
        match self.free.len().checked_sub(count.into()) {
            Some(left) => Ok(self.free.split_off(left)),
            None => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
        }
    }

    /// Takes reserved slots back.
    pub(crate) fn release(&mut self, slots: Vec<u16>) {
        // A loop that ends has closed the table.
        if self.exists {
            self.free.extend(slots);
        }
    }

    /// The slot that a request for these bytes names, if they lie in one buffer.
    pub(crate) fn slot_of(&self, vector: &IoVector) -> Option<u16> {
        let (first, others) = vector.segments().split_first()?;
        let start = first.address.addr().get();
        let count = self.buffers.partition_point(|buffer| buffer.start <= start);
        let buffer = self.buffers[..count].last()?;
        let fits = buffer.has(first)
            && others.iter().all(|segment| buffer.has(segment))
            && (others.is_empty() || vector.len() <= MAX_VECTORED_BYTES);
        fits.then_some(buffer.slot)
    }

    /// Empties the slots of memory that is no longer used.
    pub(crate) fn unregister(&mut self, ring: &Submitter<'_>, mapping: &Mapping) {
        let is_unused = |buffer: &mut BufferSlot| ptr::eq(&*buffer.mapping, mapping);
        for buffer in self.buffers.extract_if(.., is_unused) {
            // SAFETY: the slot gets no memory. The call cannot fail for a slot of the table; if it
            // did, reuse of the slot would still be safe, as it replaces the old memory.
            let _ = unsafe { fill(ring, buffer.slot, ptr::null_mut(), 0) };
            self.free.push(buffer.slot);
        }
    }

    /// Unregisters the whole table. No request is in flight.
    pub(crate) fn close(&mut self, ring: &Submitter<'_>) {
        if std::mem::take(&mut self.exists) {
            // This fails only for a ring without a table.
            let _ = ring.unregister_buffers();
        }
        self.buffers.clear();
        self.free.clear();
    }
}

/// The parts into which memory is divided: their addresses and lengths.
fn slots_of(start: usize, length: usize) -> impl Iterator<Item = (usize, usize)> {
    let offsets = (0..length).step_by(MAX_SLOT_BYTES);
    offsets.map(move |offset| (start + offset, (length - offset).min(MAX_SLOT_BYTES)))
}

/// Makes a slot name this memory, or none.
///
/// # Safety
/// The memory stays mapped until the slot is filled again or the table is closed.
unsafe fn fill(ring: &Submitter<'_>, slot: u16, address: *mut u8, length: usize) -> io::Result<()> {
    let memory = libc::iovec { iov_base: address.cast(), iov_len: length };
    // SAFETY: as this function demands.
    unsafe { ring.register_buffers_update(slot.into(), &[memory], None) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::FaultDomain;

    const GIB: usize = 1 << 30;

    /// Ignores the end of a mapping.
    struct Ignore;

    impl Unregister<Mapping> for Ignore {
        fn unregister(&self, _: Arc<Mapping>) {}
    }

    fn mapping(length: usize) -> Arc<Mapping> {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = rustix::fs::memfd_create("guest", flags).unwrap();
        rustix::fs::ftruncate(&file, length as u64).unwrap();
        let page = rustix::param::page_size();
        Arc::new(Mapping::of(&file, 0, length, page, &FaultDomain::unconnected()).unwrap())
    }

    /// A table with the buffers of these mappings, in slots by their order, unknown to any kernel.
    fn table(mappings: &[Arc<Mapping>]) -> BufferTable {
        let mut table = BufferTable::new(Arc::new(Ignore));
        for mapping in mappings {
            for (start, length) in slots_of(mapping.start().addr().get(), mapping.length()) {
                let (end, slot) = (start + length, table.buffers.len() as u16);
                let mapping = Arc::clone(mapping);
                table.buffers.push(BufferSlot { start, end, slot, mapping });
            }
        }
        table.buffers.sort_by_key(|buffer| buffer.start);
        table
    }

    /// Segments of a mapping, by offset and length.
    fn vector(mapping: &Arc<Mapping>, segments: &[(usize, usize)]) -> IoVector {
        let segment = |&(offset, length): &(usize, usize)| {
            let end = mapping.start().addr().get() + mapping.length();
            let address = mapping.start().map_addr(|start| start.saturating_add(offset));
            assert!(address.addr().get() + length <= end);
            Segment { address, length }
        };
        let (owner, lost) = (Arc::clone(mapping) as _, mapping.domain().mark());
        // SAFETY: inside of the mapping, just checked, which the vector owns; nothing else refers
        // to it.
        unsafe { IoVector::from_shared(owner, segments.iter().map(segment), lost) }
    }

    #[test]
    fn memory_is_divided_at_every_gibibyte() {
        let buffers = |length| slots_of(4096, length).collect::<Vec<_>>();
        assert_eq!(buffers(4096), [(4096, 4096)]);
        assert_eq!(buffers(GIB), [(4096, GIB)]);
        let (second, third) = (4096 + GIB, 4096 + 2 * GIB);
        assert_eq!(buffers(2 * GIB + 1), [(4096, GIB), (second, GIB), (third, 1)]);
    }

    #[test]
    fn a_slot_is_found_for_bytes_inside_of_one_piece_only() {
        // Nothing of it is touched, so it takes no memory.
        let (small, large) = (mapping(8192), mapping(2 * GIB + 4096));
        let table = table(&[small.clone(), large.clone()]);
        let slot = |mapping, segments: &[_]| table.slot_of(&vector(mapping, segments));
        assert_eq!(slot(&small, &[(0, 8192)]), Some(0));
        assert_eq!(slot(&small, &[(8191, 1)]), Some(0));
        assert_eq!(slot(&large, &[(0, GIB)]), Some(1));
        assert_eq!(slot(&large, &[(GIB, 1)]), Some(2));
        assert_eq!(slot(&large, &[(2 * GIB, 4096)]), Some(3));
        assert_eq!(slot(&large, &[(GIB - 1, 2)]), None, "across two buffers");
        assert_eq!(slot(&small, &[(4096, 1), (0, 1), (8191, 1)]), Some(0), "in any order");
        assert_eq!(slot(&large, &[(0, 1), (GIB - 1, 1)]), Some(1));
        assert_eq!(slot(&large, &[(GIB, 1), (2 * GIB - 1, 1)]), Some(2));
        assert_eq!(slot(&large, &[(GIB, 1), (GIB - 1, 1)]), None, "two buffers");
        assert_eq!(slot(&large, &[(GIB - 1, 1), (GIB, 1)]), None, "two buffers");
        assert_eq!(slot(&large, &[(0, 1), (GIB - 1, 2)]), None, "the last one across two buffers");
        let twice = [(0, GIB), (0, GIB - 4096)];
        assert_eq!(slot(&large, &twice), Some(1), "as much as the kernel takes");
        assert_eq!(slot(&large, &[(0, GIB), (0, GIB)]), None, "more than the kernel takes");
        let other = mapping(4096);
        assert_eq!(slot(&other, &[(0, 4096)]), None, "memory that was not registered");
        assert_eq!(slot(&other, &[]), None);
    }
}
