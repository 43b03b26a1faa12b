//! The part of a guest's memory that its front-end shares with this process.
//!
//! Guarantees:
//! - A guest's address is used only inside of a region.
//! - Memory of an operation in the kernel stays mapped until it completes, even if the front-end
//!   removes the region meanwhile: the operation's `IoVector` owns the whole set of regions
//!   (invariant 3, ARCHITECTURE.md).
//! - If the file of a region is truncated, only its front-end's connection ends (`mapping`).

mod shared;

use std::io;
use std::sync::Arc;

use blockhouse_core::{IoVector, Segment};
pub use shared::{MemoryKind, SharedMemory, VolatileSlice};

use crate::event_loop::local;

/// A range of the guest's physical addresses and its memory.
#[derive(Clone, Debug)]
pub struct GuestRegion {
    /// The guest's address of the first byte.
    pub guest: u64,
    /// The front-end's virtual address of the first byte. The front-end gives ring addresses as
    /// such virtual addresses.
    pub user_addr: u64,
    /// The memory.
    pub memory: Arc<SharedMemory>,
}

impl GuestRegion {
    fn length(&self) -> u64 {
        self.memory.len() as u64
    }

    /// The offset of a guest's address, if the region has it.
    fn offset_of(&self, guest: u64) -> Option<u64> {
        guest.checked_sub(self.guest).filter(|&offset| offset < self.length())
    }
}

/// Maximum segments of one vector: about four times the buffers of the longest descriptor chain,
/// because a driver's buffers may lie across regions. A guest may name the same range many times.
/// Each time, every region border in it begins a new segment.
pub const MAX_SEGMENTS: usize = 4096;

/// A range of `n` bytes may have at most `2 + n / MIN_PIECE` pieces, one for each region. Regions
/// of whole pages never cut it into more. Reason: a guest could repeatedly name a range across
/// hundreds of tiny regions, and each piece takes time.
const MIN_PIECE: usize = 4096;

/// The regions of a guest. A change creates a new set; operations keep the set that they began
/// with.
#[derive(Clone, Debug, Default)]
pub struct GuestMemory {
    /// Sorted by the guest's addresses.
    regions: Vec<GuestRegion>,
}

/// A run of a guest's bytes by its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestRange {
    /// The guest's address of the first byte.
    pub address: u64,
    /// The length in bytes.
    pub length: u32,
}

impl GuestMemory {
    /// A set without regions.
    pub fn new() -> Self {
        Self::default()
    }

    /// The regions, sorted by the guest's addresses.
    pub fn regions(&self) -> &[GuestRegion] {
        &self.regions
    }

    /// Adds a region. Returns whether it was added: it must neither overlap another one nor reach
    /// past the end of the guest's addresses.
    ///
    /// # Panics
    /// If its fault domain differs from the fault domain of the other regions: all memory of a
    /// front-end shares one fault domain.
    #[must_use]
    pub fn add(&mut self, region: GuestRegion) -> bool {
        let is_foreign =
            |other: &GuestRegion| !Arc::ptr_eq(other.memory.domain(), region.memory.domain());
        assert!(!self.regions.iter().any(is_foreign), "regions of two fault domains");
        let Some(end) = region.guest.checked_add(region.length()) else { return false };
        let overlaps =
            |other: &GuestRegion| other.guest < end && region.guest < other.guest + other.length();
        if self.regions.iter().any(overlaps) {
            return false;
        }
        let place = self.regions.partition_point(|other| other.guest < region.guest);
        self.regions.insert(place, region);
        true
    }

    /// Removes a region. Returns whether it existed.
    #[must_use]
    pub fn remove(&mut self, guest: u64, user: u64, length: u64) -> bool {
        let is_it = |region: &GuestRegion| {
            (region.guest, region.user_addr, region.length()) == (guest, user, length)
        };
        let before = self.regions.len();
        self.regions.retain(|region| !is_it(region));
        self.regions.len() < before
    }

    /// Registers all regions with the ring of the current thread's loop. The kernel then need not
    /// find and pin their pages for each request. Registered regions stay registered. The call has
    /// no effect if the engine has no ring.
    ///
    /// A region is unregistered when neither a set of regions nor an operation uses it. Until then
    /// its pages are pinned: they count against `RLIMIT_MEMLOCK`, and if they are removed from the
    /// file (as by a balloon), operations continue with the old pages. The loop waits for missing
    /// pages, unless [`SharedMemory::populate`] was called before.
    ///
    /// # Errors
    /// The kernel's error; `OutOfMemory` beyond `RLIMIT_MEMLOCK`. Requests for unregistered memory
    /// work as without this call.
    ///
    /// # Panics
    /// Outside of an event loop.
    pub fn register(&self) -> io::Result<()> {
        let register = |region: &GuestRegion| {
            local::current(|local| local.register_memory(region.memory.pages()))
        };
        self.regions.iter().try_for_each(register)
    }

    /// The guest address of the byte at the front-end's address `user`.
    pub fn guest_address_of(&self, user: u64) -> Option<u64> {
        self.regions.iter().find_map(|region| {
            let offset = user.checked_sub(region.user_addr)?;
            (offset < region.length()).then(|| region.guest + offset)
        })
    }

    /// The `length` bytes from `address` on; `None` unless one region has all of them.
    pub fn view(&self, address: u64, length: usize) -> Option<VolatileSlice> {
        let (_, region, offset) = self.find(address)?;
        VolatileSlice::new(Arc::clone(&region.memory), offset, length)
    }

    /// Copies bytes out. Returns whether the regions have all of them.
    #[must_use]
    pub fn read(&self, address: u64, into: &mut [u8]) -> bool {
        let mut done = 0;
        self.each_part(address, into.len(), |memory, offset, length| {
            memory.read(offset, &mut into[done..done + length]);
            done += length;
            true
        })
    }

    /// Copies bytes in. Returns whether the regions have all of them.
    #[must_use]
    pub fn write(&self, address: u64, from: &[u8]) -> bool {
        let mut done = 0;
        self.each_part(address, from.len(), |memory, offset, length| {
            memory.write(offset, &from[done..done + length]);
            done += length;
            true
        })
    }

    /// The bytes of all `ranges`, one after the other, for an operation. `None` if bytes are
    /// missing, if there are more than `MAX_SEGMENTS` segments, or if a range has more pieces
    /// than `MIN_PIECE` allows.
    pub fn vector(self: &Arc<Self>, ranges: &[GuestRange]) -> Option<IoVector> {
        let owner = Arc::clone(self);
        if let [range] = ranges
            && let Some((_, region, offset)) = self.find(range.address)
            && range.length as usize <= region.memory.len() - offset
        {
            let length = range.length as usize;
            let segment = Segment { address: region.memory.address(offset, length), length };
            let lost = region.memory.domain().mark();
            // SAFETY: as below.
            return Some(unsafe { IoVector::from_shared(owner, [segment], lost) });
        }
        let mut segments = Vec::with_capacity(ranges.len());
        for range in ranges {
            let found =
                self.each_part(range.address, range.length as usize, |memory, at, length| {
                    segments.push(Segment { address: memory.address(at, length), length });
                    segments.len() <= MAX_SEGMENTS
                });
            if !found {
                return None;
            }
        }
        let lost = self.regions.first()?.memory.domain().mark();
        // SAFETY: the owner keeps the mappings of all segments, and the fault domain that all
        // regions share. This process makes no reference to these bytes; all its accesses are
        // atomic or copies by `core/shared_copy`.
        Some(unsafe { IoVector::from_shared(owner, segments, lost) })
    }

    /// The region of a guest's address, with its index, and the address' offset in it.
    fn find(&self, address: u64) -> Option<(usize, &GuestRegion, usize)> {
        let index =
            self.regions.partition_point(|region| region.guest <= address).checked_sub(1)?;
        let region = &self.regions[index];
        region.offset_of(address).map(|offset| (index, region, offset as usize))
    }

    /// Calls `f` for each region's part of the range, in order, until it returns `false`. Returns
    /// `false` if a part is missing, if there are more parts than [`MIN_PIECE`] allows, or if `f`
    /// returned `false`.
    fn each_part(
        &self,
        mut address: u64,
        mut length: usize,
        mut f: impl FnMut(&SharedMemory, usize, usize) -> bool,
    ) -> bool {
        if length == 0 {
            return true;
        }
        let Some((first, _, _)) = self.find(address) else { return false };
        // The bytes after a region are in the next region or in none.
        for region in self.regions[first..].iter().take(2 + length / MIN_PIECE) {
            let Some(offset) = region.offset_of(address) else { return false };
            let here = length.min(region.memory.len() - offset as usize);
            if !f(&region.memory, offset as usize, here) {
                return false;
            }
            length -= here;
            if length == 0 {
                return true;
            }
            // The sum does not overflow: no region reaches past the end of the addresses.
            address += here as u64;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};
    use std::sync::LazyLock;

    use super::*;
    use crate::FaultDomain;

    fn file(size: u64) -> OwnedFd {
        let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, size).unwrap();
        file
    }

    fn map(file: impl AsFd, offset: u64, length: usize) -> io::Result<SharedMemory> {
        static DOMAIN: LazyLock<Arc<FaultDomain>> = LazyLock::new(FaultDomain::unconnected);
        SharedMemory::map(file, offset, length, &DOMAIN)
    }

    fn region(guest: u64, length: usize) -> GuestRegion {
        let memory = map(file(length as u64), 0, length).unwrap();
        GuestRegion { guest, user_addr: guest.wrapping_add(1 << 40), memory: Arc::new(memory) }
    }

    #[test]
    fn a_range_past_the_end_of_the_file_is_refused() {
        assert!(map(file(8192), 4096, 4096).is_ok());
        assert!(map(file(8192), 100, 8092).is_ok());
        for (offset, length) in [(4096, 4097), (8192, 1), (1 << 40, 1), (u64::MAX, 1), (0, 0)] {
            assert!(map(file(8192), offset, length).is_err(), "{offset}+{length}");
        }
        let whole_page = map(file(15_120), 0, 16_384).unwrap();
        whole_page.write(16_380, &[1; 4]);
        assert!(map(file(15_120), 0, 16_385).is_err());
    }

    #[test]
    fn only_files_in_memory_are_mapped() {
        // A file outside tmpfs and hugetlbfs is on a disk, a network or FUSE: a page fault there
        // may block.
        let on_disk = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        on_disk.set_len(8192).unwrap();
        let error = map(&on_disk, 0, 8192).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Unsupported);
        assert!(error.to_string().contains("use a memfd"), "{error}");
        assert!(map(std::fs::File::open("/dev/zero").unwrap(), 0, 8192).is_err());
        let sealable = rustix::fs::MemfdFlags::ALLOW_SEALING;
        let sealed = rustix::fs::memfd_create("guest", sealable).unwrap();
        rustix::fs::ftruncate(&sealed, 8192).unwrap();
        assert!(map(&sealed, 0, 8192).unwrap().kind().can_shrink);
        rustix::fs::fcntl_add_seals(&sealed, rustix::fs::SealFlags::SHRINK).unwrap();
        let kind = map(&sealed, 0, 8192).unwrap().kind();
        assert!(!kind.can_shrink && !kind.is_huge());
    }

    #[test]
    fn an_offset_inside_of_a_page_is_kept() {
        let file = file(8192);
        let (whole, part) = (map(&file, 0, 8192).unwrap(), map(&file, 100, 50).unwrap());
        whole.write(100, &[7; 50]);
        let mut bytes = [0; 50];
        part.read(0, &mut bytes);
        assert_eq!((bytes, part.len()), ([7; 50], 50));
    }

    #[test]
    fn populated_memory_is_there_and_as_it_was() {
        let file = file(1 << 20);
        let memory = map(&file, 0, 1 << 20).unwrap();
        memory.write(8192, &[9]);
        let taken = || rustix::fs::fstat(&file).unwrap().st_blocks * 512;
        assert!(taken() < 1 << 20);
        memory.populate();
        assert_eq!(taken(), 1 << 20);
        let mut bytes = [1; 2];
        memory.read(8191, &mut bytes);
        assert_eq!(bytes, [0, 9]);
    }

    /// The kernel's flags of the mapping that an address of ours lies in (`VmFlags` in proc(5)).
    fn flags_of_mapping(address: usize) -> String {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut inside = false;
        for line in smaps.lines() {
            let mut ends = line.split(' ').next().unwrap_or("").split('-');
            let mut end = || usize::from_str_radix(ends.next()?, 16).ok();
            if let (Some(start), Some(end)) = (end(), end()) {
                inside = (start..end).contains(&address);
            } else if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| inside) {
                return flags.into();
            }
        }
        panic!("no mapping at {address:x}");
    }

    #[test]
    fn core_files_do_not_get_a_guests_memory() {
        let memory = map(file(8192), 0, 8192).unwrap();
        let flags = flags_of_mapping(memory.address(0, 1).addr().get());
        assert!(flags.split(' ').any(|flag| flag == "dd"), "{flags}");
    }

    #[test]
    fn neighbours_are_crossed_and_gaps_are_not() {
        let mut memory = GuestMemory::new();
        assert!(memory.add(region(0x10000, 4096)) && memory.add(region(0x11000, 4096)));
        assert!(memory.write(0x10fff, &[1, 2]));
        let mut bytes = [0; 2];
        assert!(memory.read(0x10fff, &mut bytes));
        assert_eq!(bytes, [1, 2]);
        for address in [0xffff, 0x11fff, u64::MAX] {
            assert!(!memory.read(address, &mut bytes), "{address:x}");
        }
        let memory = Arc::new(memory);
        let vector = |address, length| memory.vector(&[GuestRange { address, length }]);
        assert_eq!(vector(0x10fff, 2).unwrap().segments().len(), 2);
        assert_eq!(vector(0x10000, 4096).unwrap().segments().len(), 1);
        assert!(vector(0x10000, 8193).is_none() && vector(0, u32::MAX).is_none());
    }

    #[test]
    fn regions_are_found_in_whatever_order_they_came() {
        let mut memory = GuestMemory::new();
        for page in [5, 2, 4, 0, 3] {
            assert!(memory.add(region(page * 4096, 4096)));
            assert!(memory.write(page * 4096, &[page as u8 + 1; 4096]));
        }
        let mut bytes = vec![0; 4 * 4096];
        assert!(memory.read(2 * 4096, &mut bytes));
        assert!(bytes.chunks(4096).zip(3..).all(|(page, value)| page == [value; 4096]));
        assert!(memory.read(0, &mut bytes[..4096]) && bytes[0] == 1);
        assert!(!memory.read(0, &mut bytes[..4097]), "a gap follows");
        assert!(!memory.read(2 * 4096, &mut [0; 4 * 4096 + 1]), "nothing follows");
    }

    #[test]
    fn a_vector_has_a_bounded_number_of_segments() {
        let mut memory = GuestMemory::new();
        assert!((0..64).all(|page| memory.add(region(page * 4096, 4096))));
        let memory = Arc::new(memory);
        let all = GuestRange { address: 0, length: 64 * 4096 };
        let vector = |times| memory.vector(&vec![all; times]);
        assert_eq!(vector(MAX_SEGMENTS / 64).unwrap().segments().len(), MAX_SEGMENTS);
        assert!(vector(MAX_SEGMENTS / 64 + 1).is_none());
        let one = GuestRange { address: 0, length: 1 };
        let mut more = vec![all; MAX_SEGMENTS / 64];
        more.push(one);
        assert!(memory.vector(&more).is_none());
    }

    #[test]
    fn regions_of_any_size_are_crossed_but_not_many_tiny_ones() {
        let mut memory = GuestMemory::new();
        // One region as long as a client's rings, then many regions of one byte.
        assert!(memory.add(region(0x10000, 15_120)));
        assert!((0..509).all(|at| memory.add(region(0x10000 + 15_120 + at, 1))));
        let end = 0x10000 + 15_120 + 509;
        assert!(memory.add(region(end, 8192)));
        let mut bytes = vec![0; 15_121];
        assert!(memory.write(0x10000, &vec![5; 15_121]) && memory.read(0x10000, &mut bytes));
        assert!(bytes.iter().all(|&byte| byte == 5));
        let memory = Arc::new(memory);
        let pieces = |address, length| {
            let vector = memory.vector(&[GuestRange { address, length }]);
            vector.map(|vector| vector.segments().len())
        };
        assert_eq!(pieces(0x10000, 15_120), Some(1));
        assert_eq!(pieces(0x10000, 15_120 + 4), Some(5));
        assert_eq!(pieces(0x10000, 15_120 + 5), None);
        assert_eq!(pieces(end - 1, 2), Some(2));
        assert_eq!(pieces(end - 2, 3), None);
        assert_eq!(pieces(end - 100, 4096), None);
    }

    #[test]
    fn regions_do_not_overlap() {
        let mut memory = GuestMemory::new();
        assert!(memory.add(region(0x10000, 8192)));
        for guest in [0xf000, 0x10000, 0x11000, u64::MAX - 100] {
            assert!(!memory.add(region(guest, 8192)), "{guest:x}");
        }
        assert!(!memory.remove(0x10000, 0, 8192));
        assert!(memory.remove(0x10000, 0x10000 + (1 << 40), 8192));
        assert!(memory.add(region(0x11000, 4096)));
    }

    #[test]
    fn a_vector_keeps_memory_that_was_taken_away() {
        let mut memory = GuestMemory::new();
        assert!(memory.add(region(0, 4096)));
        let shared = Arc::new(memory.clone());
        let mut vector = shared.vector(&[GuestRange { address: 16, length: 8 }]).unwrap();
        assert!(memory.remove(0, 1 << 40, 4096));
        drop(shared);
        vector.copy_from(&[5; 8]);
        let mut bytes = [0; 8];
        vector.copy_to(&mut bytes);
        assert_eq!(bytes, [5; 8]);
    }

    #[test]
    fn the_front_ends_addresses_are_found() {
        let mut memory = GuestMemory::new();
        assert!(memory.add(region(0x4000, 4096)));
        assert_eq!(memory.guest_address_of((1 << 40) + 0x4010), Some(0x4010));
        assert_eq!(memory.guest_address_of((1 << 40) + 0x5000), None);
        assert_eq!(memory.guest_address_of(0), None);
    }
}
