//! A mapping of memory that other processes write to at any time.
//!
//! This process makes no reference to its bytes: single values are loaded and stored as atomics,
//! and runs of bytes are copied as `core/shared_copy` does. So a loaded value is one that some
//! process stored, and no behaviour is undefined, even if other processes write at the same time.
//! Every access is checked against the length of the mapping.
//!
//! Other processes may also truncate the memory: values are zeros from then on, and the memory's
//! [`FaultDomain`] has failed (`mapping`). They cannot make an access block, because only files
//! whose pages are in memory are mapped: those of tmpfs (a memfd is one) and hugetlbfs. A page
//! fault on any other file may block in its file system, each time its owner has dropped the page:
//! FUSE asks an untrusted process, NFS asks a server, and ext4 or XFS read the disk and throttle a
//! writer while many pages are dirty. A loop that touched such a page would block all its guests.
//! Device DAX and dma-bufs are not mapped either: their drivers decide what a fault does, and their
//! length cannot be queried.

use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use blockhouse_core::{StateMemory, copy_from_shared, copy_to_shared};
use rustix::fs::SealFlags;

use crate::driver::registrations::Registrations;
use crate::mapping::{FaultDomain, Mapping};

/// `HUGETLBFS_MAGIC` from `<linux/magic.h>`: files of pages that are larger than the usual ones.
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// Memory shared with other processes. The memory is unmapped when this value is dropped and every
/// io_uring has emptied its buffer slots for the memory.
pub struct SharedMemory {
    /// The address of the first requested byte.
    address: NonNull<u8>,
    length: usize,
    kind: MemoryKind,
    /// The whole pages around the requested bytes, and the rings in which they have slots.
    pages: Registrations<Mapping>,
}

/// The kind of a memory file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryKind {
    /// Page size in bytes.
    pub page: usize,
    /// Whether the file can be made shorter (no `F_SEAL_SHRINK` when it was mapped).
    pub can_shrink: bool,
}

impl MemoryKind {
    /// Whether the pages are of hugetlbfs.
    pub fn is_huge(&self) -> bool {
        self.page != rustix::param::page_size()
    }

    /// Inspects a file. `fstatfs(2)` is called only on an in-memory file system, because a FUSE
    /// daemon may never answer even this call. A query of the seals identifies these files, because
    /// the kernel supports seals only for tmpfs and hugetlbfs (`memfd_file_seals_ptr` in its
    /// `mm/memfd.c`).
    fn of(file: impl AsFd) -> io::Result<Self> {
        let seals = rustix::fs::fcntl_get_seals(&file).map_err(|_| {
            let what = "its pages may have to be waited for; use a memfd (QEMU: -object \
                        memory-backend-memfd,share=on; libvirt: <source type='memfd'/>), or a file in \
                        /dev/shm or on hugetlbfs";
            io::Error::new(io::ErrorKind::Unsupported, what)
        })?;
        let status = rustix::fs::fstatfs(&file)?;
        let page = if status.f_type as u64 == HUGETLBFS_MAGIC {
            status.f_bsize as usize
        } else {
            rustix::param::page_size()
        };
        Ok(Self { page, can_shrink: !seals.contains(SealFlags::SHRINK) })
    }
}

// SAFETY: the object owns its mapping, which is not tied to a thread.
unsafe impl Send for SharedMemory {}
// SAFETY: all accesses through `&self` are atomic, or copies by address. No reference to the memory
// exists, and its users expect changes at any time.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Maps `length` bytes of the file from `offset` on; neither needs alignment. The range may
    /// reach up to the end of the file's last page. If its pages vanish later, `domain` fails.
    ///
    /// # Errors
    /// `Unsupported` for a file whose pages are not in memory, `InvalidInput` if the range is empty
    /// or reaches past the file's last page, `QuotaExceeded` beyond 16,384 mappings in this process
    /// or 2048 of `domain`, or the kernel's error.
    pub fn map(
        file: impl AsFd,
        offset: u64,
        length: usize,
        domain: &Arc<FaultDomain>,
    ) -> io::Result<Self> {
        let kind = MemoryKind::of(&file)?;
        let page = kind.page as u64;
        let invalid = |what| io::Error::new(io::ErrorKind::InvalidInput, what);
        let start = offset & !(page - 1);
        let lead = (offset - start) as usize;
        let end =
            offset.checked_add(length as u64).and_then(|end| end.checked_next_multiple_of(page));
        let mapped_length = end
            .and_then(|end| usize::try_from(end - start).ok())
            .filter(|_| length > 0)
            .ok_or_else(|| invalid("no such range"))?;
        // The rest of the last page can be accessed, too.
        let size = (rustix::fs::fstat(&file)?.st_size as u64).next_multiple_of(page);
        if size < offset + length as u64 {
            return Err(invalid("the file ends before the range does"));
        }
        let pages = Mapping::of(&file, start, mapped_length, kind.page, domain)?;
        // SAFETY: `lead` lies inside the first page of the mapping.
        let address = unsafe { pages.start().add(lead) };
        Ok(Self { address, length, kind, pages: Registrations::new(pages) })
    }

    /// The kind of the memory's file.
    pub fn kind(&self) -> MemoryKind {
        self.kind
    }

    /// The domain that fails when the memory vanishes.
    pub fn domain(&self) -> &Arc<FaultDomain> {
        self.pages.resource().domain()
    }

    /// The offset of an address of this process, as a [`Fault`](crate::Fault) has it; `None` when
    /// the address is not in the memory's pages. An address in the first page, before the first
    /// byte, has the offset 0.
    pub fn offset_of(&self, address: usize) -> Option<usize> {
        let pages = self.pages.resource();
        let inside = address.checked_sub(pages.start().addr().get())? < pages.length();
        inside.then(|| address.saturating_sub(self.address.addr().get()))
    }

    /// Makes the host allocate all pages now (`MADV_POPULATE_WRITE`), which may take time; best
    /// effort. Afterwards registering the memory is quick.
    pub fn populate(&self) {
        self.pages.resource().populate();
    }

    /// The pages, for a ring's table.
    pub(super) fn pages(&self) -> &Registrations<Mapping> {
        &self.pages
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Always false: an empty range cannot be mapped.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The address of `length` bytes from `offset` on.
    ///
    /// # Panics
    /// If the range is not inside the memory.
    fn at(&self, offset: usize, length: usize) -> NonNull<u8> {
        let inside = offset.checked_add(length).is_some_and(|end| end <= self.length);
        assert!(inside, "{length} bytes at {offset} of a mapping of {}", self.length);
        // SAFETY: checked to be inside of the mapping.
        unsafe { self.address.add(offset) }
    }

    /// As `at`, for a naturally aligned value; also panics if the address is misaligned.
    fn aligned(&self, offset: usize, length: usize) -> NonNull<u8> {
        let address = self.at(offset, length);
        assert!(address.addr().get().is_multiple_of(length), "a misaligned value at {offset}");
        address
    }

    /// The address of a range that lies inside, for an `IoVector` that keeps this alive.
    pub(super) fn address(&self, offset: usize, length: usize) -> NonNull<u8> {
        self.at(offset, length)
    }

    /// Copies bytes out: headers and the like.
    ///
    /// # Panics
    /// If the range is not inside the memory.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        let source = self.at(offset, into.len()).as_ptr();
        // SAFETY: inside of the mapping, just checked; this process accesses it only by atomics or
        // such copies. The target is borrowed mutably, so the two do not overlap.
        unsafe { copy_from_shared(source, into.as_mut_ptr(), into.len()) };
    }

    /// Copies bytes in.
    ///
    /// # Panics
    /// If the range is not inside the memory.
    pub fn write(&self, offset: usize, from: &[u8]) {
        let target = self.at(offset, from.len()).as_ptr();
        // SAFETY: as in `read`, with the roles exchanged.
        unsafe { copy_to_shared(from.as_ptr(), target, from.len()) };
    }

    fn atomic_u8(&self, offset: usize) -> &AtomicU8 {
        // SAFETY: inside of the mapping, which lives as long as `self`; used as an atomic only.
        unsafe { AtomicU8::from_ptr(self.at(offset, 1).as_ptr()) }
    }

    fn atomic_u16(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: as above, and aligned.
        unsafe { AtomicU16::from_ptr(self.aligned(offset, 2).as_ptr().cast()) }
    }

    fn atomic_u32(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: as above, and aligned.
        unsafe { AtomicU32::from_ptr(self.aligned(offset, 4).as_ptr().cast()) }
    }

    fn atomic_u64(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: as above, and aligned.
        unsafe { AtomicU64::from_ptr(self.aligned(offset, 8).as_ptr().cast()) }
    }
}

impl fmt::Debug for SharedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {:p}", self.length, self.address)
    }
}

/// A part of shared memory. Clones refer to the same bytes. Values are little-endian, as virtio has
/// them; offsets are in bytes from the start of the slice. An access panics when it is not inside,
/// or when its address is not a multiple of its size.
#[derive(Clone, Debug)]
pub struct VolatileSlice {
    memory: Arc<SharedMemory>,
    start: usize,
    length: usize,
}

impl VolatileSlice {
    /// The `length` bytes of `memory` from `start` on; `None` when it has fewer.
    pub fn new(memory: Arc<SharedMemory>, start: usize, length: usize) -> Option<Self> {
        let inside = start.checked_add(length).is_some_and(|end| end <= memory.len());
        inside.then_some(Self { memory, start, length })
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Whether the first byte's address is a multiple of `alignment`, a power of two.
    pub fn is_aligned(&self, alignment: usize) -> bool {
        let address = self.memory.address.addr().get() + self.start;
        address & (alignment - 1) == 0
    }

    fn place(&self, offset: usize, length: usize) -> usize {
        let inside = offset.checked_add(length).is_some_and(|end| end <= self.length);
        assert!(inside, "{length} bytes at {offset} of a view of {}", self.length);
        self.start + offset
    }

    /// Copies bytes out.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        self.memory.read(self.place(offset, into.len()), into);
    }

    /// Loads a value.
    pub fn load_u8(&self, offset: usize) -> u8 {
        self.memory.atomic_u8(self.place(offset, 1)).load(Ordering::Relaxed)
    }

    /// Loads a value.
    pub fn load_u16(&self, offset: usize, order: Ordering) -> u16 {
        u16::from_le(self.memory.atomic_u16(self.place(offset, 2)).load(order))
    }

    /// Loads a value.
    pub fn load_u32(&self, offset: usize) -> u32 {
        u32::from_le(self.memory.atomic_u32(self.place(offset, 4)).load(Ordering::Relaxed))
    }

    /// Loads a value.
    pub fn load_u64(&self, offset: usize, order: Ordering) -> u64 {
        u64::from_le(self.memory.atomic_u64(self.place(offset, 8)).load(order))
    }

    /// Stores a value, after everything that was stored before.
    pub fn store_u8(&self, offset: usize, value: u8) {
        self.memory.atomic_u8(self.place(offset, 1)).store(value, Ordering::Release);
    }

    /// Stores a value, after everything that was stored before.
    pub fn store_u16(&self, offset: usize, value: u16) {
        let place = self.place(offset, 2);
        self.memory.atomic_u16(place).store(value.to_le(), Ordering::Release);
    }

    /// Stores a value, after everything that was stored before.
    pub fn store_u32(&self, offset: usize, value: u32) {
        let place = self.place(offset, 4);
        self.memory.atomic_u32(place).store(value.to_le(), Ordering::Release);
    }

    /// Stores a value, after everything that was stored before.
    pub fn store_u64(&self, offset: usize, value: u64) {
        let place = self.place(offset, 8);
        self.memory.atomic_u64(place).store(value.to_le(), Ordering::Release);
    }

    /// Sets bits, keeping those that others set at the same time.
    pub fn set_bits_u8(&self, offset: usize, bits: u8) {
        self.memory.atomic_u8(self.place(offset, 1)).fetch_or(bits, Ordering::Release);
    }

    /// Sets bits, keeping those that others set at the same time.
    pub fn set_bits_u64(&self, offset: usize, bits: u64) {
        let place = self.place(offset, 8);
        self.memory.atomic_u64(place).fetch_or(bits.to_le(), Ordering::Release);
    }
}

/// The state outlives the process if the file of the memory does.
impl StateMemory for VolatileSlice {
    fn words(&self) -> usize {
        self.length / size_of::<u64>()
    }

    fn load(&self, index: usize) -> u64 {
        self.load_u64(index * size_of::<u64>(), Ordering::Acquire)
    }

    fn store(&self, index: usize, value: u64) {
        self.store_u64(index * size_of::<u64>(), value);
    }

    /// The memory is allocated as a whole, if its file has no holes.
    fn reserve(&self, _words: usize) -> bool {
        true
    }

    fn release(&self, _words: usize) {}
}
