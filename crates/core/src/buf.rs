//! Aligned memory for I/O, lent to operations and taken back.
//!
//! A [`Buffer`] is memory with one owner, which lends it to an operation as an [`IoVector`]. While
//! the loan exists, the owner cannot access the bytes. A loan that outlives its buffer (the future
//! was dropped before the kernel completed the operation) keeps the memory alive. A [`BufferPool`]
//! keeps returned memory for the next request, up to a bound, so a warmed-up path allocates
//! nothing.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::io;
use std::mem::ManuallyDrop;
use std::ptr::{self, NonNull};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::error::{Error, Result, errno};
use crate::{IoVector, Segment};

/// Every buffer starts at a multiple of this many bytes: a page, which satisfies the direct I/O of
/// every device with blocks up to 4 KiB.
pub const BLOCK_ALIGNMENT: usize = 4096;

/// The binary logarithm of the smallest size class of a pool, 4 KiB.
const MIN_CLASS: u32 = BLOCK_ALIGNMENT.trailing_zeros();
/// The number of size classes, each twice as large as the one before; the largest is 64 MiB.
const CLASSES: usize = 15;

/// Memory of at least this many bytes is mapped, so the kernel provides each page at first use. So
/// a client that announces a long write and sends little of it uses little memory.
const MAPPED: usize = 256 << 10;

/// Zero-initialised memory, freed on drop. No reference into it exists except those that `Buffer`
/// gives out.
struct Memory {
    address: NonNull<u8>,
    capacity: usize,
}

// SAFETY: `Memory` is a plain allocation; `Buffer` decides who may access its bytes, and when.
unsafe impl Send for Memory {}
// SAFETY: as above; a shared `Memory` gives no access to its bytes.
unsafe impl Sync for Memory {}

impl Memory {
    /// Memory for `length` bytes, in whole pages and at least one. `None` on ENOMEM.
    fn allocate(length: usize) -> Option<Self> {
        let capacity = length.max(1).checked_next_multiple_of(BLOCK_ALIGNMENT)?;
        let layout = Layout::from_size_align(capacity, BLOCK_ALIGNMENT).ok()?;
        let address = if capacity >= MAPPED {
            let (access, kind) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
            // SAFETY: a new mapping at an address of the kernel's choice; `capacity` is not zero.
            let mapped = unsafe { mmap_anonymous(ptr::null_mut(), capacity, access, kind) };
            mapped.map_or(ptr::null_mut(), |address| address.cast())
        } else {
            // SAFETY: `capacity` was rounded up to at least one page, so it is not zero.
            unsafe { alloc_zeroed(layout) }
        };
        Some(Self { address: NonNull::new(address)?, capacity })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let Self { address, capacity } = *self;
        if capacity >= MAPPED {
            // SAFETY: mapped in `allocate` with this length, and this is its only owner.
            let unmapped = unsafe { munmap(address.as_ptr().cast(), capacity) };
            debug_assert!(unmapped.is_ok(), "{unmapped:?}");
        } else {
            // SAFETY: a layout of this size and alignment was valid in `allocate`.
            let layout = unsafe { Layout::from_size_align_unchecked(capacity, BLOCK_ALIGNMENT) };
            // SAFETY: allocated in `allocate` with this layout, and this is its only owner.
            unsafe { dealloc(address.as_ptr(), layout) };
        }
    }
}

/// Aligned memory with one owner, which lends it to one operation at a time.
///
/// ```
/// use blockhouse_core::Buffer;
///
/// let mut buffer = Buffer::try_new(8192)?;
/// let loan = buffer.lend();
/// assert!(buffer.is_lent());
/// // An operation drops its loan when it completes. While a loan exists, `bytes` panics.
/// drop(loan);
/// assert_eq!(buffer.bytes(), [0; 8192]);
/// # Ok::<(), blockhouse_core::Error>(())
/// ```
pub struct Buffer {
    /// Invariant: `memory` has other owners exactly as long as loans of this buffer exist. It is
    /// taken out only by `drop`.
    memory: ManuallyDrop<Arc<Memory>>,
    length: usize,
    pool: Option<BufferPool>,
}

impl Buffer {
    /// `length` zero bytes outside any pool. Aborts the process on ENOMEM, so use it only for small
    /// sizes and in tools: a server uses [`try_new`](Self::try_new) for requests' memory.
    pub fn new(length: usize) -> Self {
        Self::try_new(length).unwrap_or_else(|_| {
            let layout = Layout::from_size_align(length, BLOCK_ALIGNMENT);
            handle_alloc_error(layout.unwrap_or(Layout::new::<u8>()))
        })
    }

    /// `length` zero bytes outside any pool.
    ///
    /// # Errors
    /// ENOMEM if memory runs out.
    pub fn try_new(length: usize) -> Result<Self> {
        let memory = Memory::allocate(length).ok_or_else(|| out_of_memory(length))?;
        Ok(Self::over(Arc::new(memory), length, None))
    }

    fn over(memory: Arc<Memory>, length: usize, pool: Option<BufferPool>) -> Self {
        Self { memory: ManuallyDrop::new(memory), length, pool }
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The maximum length in bytes.
    pub fn capacity(&self) -> usize {
        self.memory.capacity
    }

    /// Changes the length, within the capacity. Bytes beyond the old length are not cleared.
    ///
    /// # Panics
    /// When `length` exceeds the capacity.
    pub fn set_len(&mut self, length: usize) {
        assert!(length <= self.capacity(), "a buffer of {} cannot hold {length}", self.capacity());
        self.length = length;
    }

    /// Whether a loan still exists.
    pub fn is_lent(&self) -> bool {
        // Acquire: this thread sees all writes that the borrower made before it dropped its loan.
        let lent = Arc::strong_count(&self.memory) != 1;
        fence(Ordering::Acquire);
        lent
    }

    /// Lends the whole buffer until the vector and all parts split off from it are dropped.
    ///
    /// # Panics
    /// When a loan still exists.
    pub fn lend(&mut self) -> IoVector {
        self.lend_range(0, self.length)
    }

    /// Lends `length` bytes from `start` on; otherwise as [`lend`](Self::lend).
    ///
    /// # Panics
    /// When a loan still exists, or the range is not inside the buffer.
    pub fn lend_range(&mut self, start: usize, length: usize) -> IoVector {
        self.assert_not_lent("lend");
        assert!(start <= self.length && length <= self.length - start, "a loan past the end");
        // SAFETY: start is inside the allocation.
        let address = unsafe { self.memory.address.add(start) };
        let owner: Arc<Memory> = Arc::clone(&self.memory);
        // SAFETY: the memory lives as long as `owner`. The buffer was its only owner, so no other
        // vector over it exists. Only `bytes` and `bytes_mut` return references, which borrow the
        // buffer, so none exists beside `&mut self`. Both panic while a loan exists.
        unsafe { IoVector::from_raw(owner, [Segment { address, length }]) }
    }

    /// The bytes.
    ///
    /// # Panics
    /// When a loan still exists.
    pub fn bytes(&self) -> &[u8] {
        self.assert_not_lent("read");
        // SAFETY: initialised (zeroed) memory; no loan is out, and a new one needs `&mut self`.
        unsafe { std::slice::from_raw_parts(self.memory.address.as_ptr(), self.length) }
    }

    /// The bytes, for changing them.
    ///
    /// # Panics
    /// When a loan still exists.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.assert_not_lent("change");
        // SAFETY: as in `bytes`, and `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.memory.address.as_ptr(), self.length) }
    }

    fn assert_not_lent(&self, verb: &str) {
        assert!(!self.is_lent(), "cannot {verb} a buffer that is lent out");
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // Memory that is still lent belongs to its borrower from then on.
        let lent = self.is_lent();
        // SAFETY: `memory` is not used after this; `drop` runs once.
        let memory = unsafe { ManuallyDrop::take(&mut self.memory) };
        if let Some(pool) = self.pool.take()
            && !lent
        {
            pool.recycle(memory);
        }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} of {} bytes)", self.length, self.capacity())
    }
}

/// Keeps memory between requests, in size classes of powers of two. Clones share the memory.
#[derive(Clone)]
pub struct BufferPool(Arc<Mutex<FreeLists>>);

struct FreeLists {
    classes: [Vec<Arc<Memory>>; CLASSES],
    cached_bytes: usize,
    max_cached_bytes: usize,
}

impl FreeLists {
    fn clear(&mut self) {
        self.classes.iter_mut().for_each(Vec::clear);
        self.cached_bytes = 0;
    }
}

fn out_of_memory(length: usize) -> Error {
    let error = io::Error::from_raw_os_error(errno::ENOMEM);
    Error::host(format!("cannot get {length} bytes of memory for a request"), error)
        .hint("give the server more memory, or let fewer clients use it at once")
}

impl BufferPool {
    /// A pool that keeps at most `max_cached_bytes` that are not in use. It does not limit buffers
    /// in use: its callers limit their requests.
    pub fn new(max_cached_bytes: usize) -> Self {
        let classes = Default::default();
        Self(Arc::new(Mutex::new(FreeLists { classes, cached_bytes: 0, max_cached_bytes })))
    }

    /// A buffer of `length` bytes with arbitrary content.
    ///
    /// # Errors
    /// ENOMEM if memory runs out even after the pool's cached buffers were freed.
    pub fn get(&self, length: usize) -> Result<Buffer> {
        let class = class_of(length);
        let cached = class.and_then(|class| {
            let mut free = self.free_lists();
            let memory = free.classes[class].pop()?;
            free.cached_bytes -= memory.capacity;
            Some(memory)
        });
        let memory = match cached {
            Some(memory) => memory,
            None => Arc::new(self.allocate(length, class)?),
        };
        Ok(Buffer::over(memory, length, Some(self.clone())))
    }

    fn allocate(&self, length: usize, class: Option<usize>) -> Result<Memory> {
        let capacity = class.map_or(length, |class| 1 << (class as u32 + MIN_CLASS));
        Memory::allocate(capacity)
            .or_else(|| {
                // The cached buffers of other sizes are freed, because their memory may be enough.
                self.free_lists().clear();
                Memory::allocate(capacity)
            })
            .ok_or_else(|| out_of_memory(length))
    }

    fn recycle(&self, memory: Arc<Memory>) {
        let mut free = self.free_lists();
        let Some(class) = class_of(memory.capacity) else { return };
        if free.cached_bytes + memory.capacity <= free.max_cached_bytes {
            free.cached_bytes += memory.capacity;
            free.classes[class].push(memory);
        }
    }

    fn free_lists(&self) -> MutexGuard<'_, FreeLists> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The smallest class that holds `length` bytes.
fn class_of(length: usize) -> Option<usize> {
    let bits = length.max(1).checked_next_power_of_two()?.trailing_zeros();
    let class = bits.saturating_sub(MIN_CLASS) as usize;
    (class < CLASSES).then_some(class)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back_to_the_pool_and_is_used_again() {
        let pool = BufferPool::new(1 << 20);
        let first = pool.get(5000).unwrap();
        let address = first.bytes().as_ptr();
        assert_eq!((first.len(), first.capacity()), (5000, 8192));
        drop(first);
        assert_eq!(pool.get(8000).unwrap().bytes().as_ptr(), address);
    }

    #[test]
    fn a_pool_keeps_no_more_than_its_bound() {
        let pool = BufferPool::new(8192);
        let buffers: Vec<_> = (0..4).map(|_| pool.get(4096).unwrap()).collect();
        drop(buffers);
        assert_eq!(pool.free_lists().cached_bytes, 8192);
    }

    #[test]
    fn a_loan_outlives_its_buffer() {
        let pool = BufferPool::new(1 << 20);
        let mut buffer = pool.get(4096).unwrap();
        let mut loan = buffer.lend();
        drop(buffer);
        loan.fill(7);
        let mut byte = [0];
        loan.copy_to(&mut byte);
        assert_eq!(byte, [7]);
        assert_eq!(pool.free_lists().cached_bytes, 0, "memory on loan is not handed out again");
    }

    #[test]
    fn a_returned_loan_shows_what_was_written() {
        let mut buffer = Buffer::new(10);
        let mut loan = buffer.lend_range(2, 3);
        loan.fill(1);
        drop(loan);
        assert_eq!(buffer.bytes(), [0, 0, 1, 1, 1, 0, 0, 0, 0, 0]);
    }

    #[test]
    #[should_panic(expected = "lent out")]
    fn lent_bytes_cannot_be_looked_at() {
        let mut buffer = Buffer::new(10);
        let _loan = buffer.lend();
        let _ = buffer.bytes();
    }

    #[test]
    fn sizes_beyond_the_largest_class_are_served() {
        let pool = BufferPool::new(1 << 30);
        assert_eq!(pool.get((64 << 20) + 1).unwrap().capacity(), (64 << 20) + 4096);
    }

    #[test]
    fn memory_that_is_not_there_is_an_error() {
        let pool = BufferPool::new(1 << 20);
        drop(pool.get(4096).unwrap());
        // Beyond the address space; beyond the limit of an allocation; overflow when rounded up.
        for length in [1 << 60, isize::MAX as usize, usize::MAX] {
            for refused in [pool.get(length), Buffer::try_new(length)] {
                assert_eq!(refused.unwrap_err().errno(), errno::ENOMEM);
            }
        }
        assert_eq!(
            pool.free_lists().cached_bytes,
            0,
            "what was kept is given back before a request fails"
        );
        assert_eq!(pool.get(4096).unwrap().len(), 4096);
    }
}
