//! Memory on its way to or from the kernel.
//!
//! An [`IoVector`] is a list of memory segments together with the owner that keeps them alive. The
//! vector is the only view of its bytes: it is not `Clone`, and dividing it gives parts that do not
//! overlap. So the holder of a vector (an engine, a worker thread, the kernel) may read and write
//! the bytes until it drops the vector. This upholds invariant 3 (ARCHITECTURE.md): the kernel
//! never holds memory without an owner.
//!
//! The bytes are private, or shared with another process (a guest), which may change them at any
//! time and may even remove the memory. Shared bytes are copied by
//! [`shared_copy`](crate::copy_from_shared). [`IoVector::is_intact`] returns false if memory has
//! vanished.
//!
//! The bytes of a kernel's request may be in pages of the kernel instead, until they are needed in
//! memory: see [`KernelPages`].

mod kept;
mod pages;

use std::any::Any;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use smallvec::SmallVec;

use crate::shared_copy::{copy_from_shared, copy_to_shared, fill_shared};
use crate::{Error, Result, errno};

pub use kept::KeptVector;
pub use pages::{KernelPages, PageUse};

/// A piece of memory, laid out as `struct iovec` (POSIX, `<sys/uio.h>`): engines pass a slice of
/// them to the kernel unchanged.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// The first byte.
    pub address: NonNull<u8>,
    /// The length in bytes.
    pub length: usize,
}

/// Segments of memory and their owner, and the only view of those bytes. Not `Clone`;
/// [`split_off`](Self::split_off) divides it.
///
/// ```
/// use blockhouse_core::Buffer;
///
/// let mut buffer = Buffer::try_new(8192)?;
/// let mut first = buffer.lend();
/// // Two operations can use the two parts at the same time.
/// let mut second = first.split_off(4096);
/// first.fill(1);
/// second.fill(2);
/// drop((first, second));
/// assert_eq!(buffer.bytes()[4095..4097], [1, 2]);
/// # Ok::<(), blockhouse_core::Error>(())
/// ```
pub struct IoVector {
    /// The kernel's pages of the request whose bytes the vector has. They are before `owner`, so
    /// that their reference is dropped first: a lender that has its memory back has its pages, too.
    pages: Option<Arc<KernelPages>>,
    owner: Arc<dyn Any + Send + std::marker::Sync>,
    segments: SmallVec<[Segment; 2]>,
    length: usize,
    /// For shared memory, the flag that is set when some of it has vanished. Lives as long as
    /// `owner`. For a vector that can never be intact again, [`ALWAYS_LOST`].
    lost: Option<NonNull<AtomicBool>>,
}

/// The `lost` flag of vectors that were cut past their end, or joined from a vector that was not
/// intact. Such a cut is an error in the code for one request, so [`IoVector::check_intact`] fails
/// only that request.
static ALWAYS_LOST: AtomicBool = AtomicBool::new(true);

// SAFETY: the vector is the only view of its private bytes (`from_raw` demands it, no function here
// duplicates a vector). Accesses to shared bytes are atomic. The owner is itself `Send + Sync`, so
// a move of the vector moves the access. `lost` is an atomic that the owner keeps, or a static.
unsafe impl Send for IoVector {}

impl IoVector {
    /// A view of private `segments`, kept alive by `owner`.
    ///
    /// # Safety
    /// Each segment must stay valid for reads and writes as long as `owner` lives, and no reference
    /// to its bytes and no other `IoVector` over them may be used while the new one exists.
    pub unsafe fn from_raw(
        owner: Arc<dyn Any + Send + std::marker::Sync>,
        segments: impl IntoIterator<Item = Segment>,
    ) -> Self {
        let segments: SmallVec<[Segment; 2]> =
            segments.into_iter().filter(|segment| segment.length > 0).collect();
        let length = segments.iter().map(|segment| segment.length).sum();
        Self { owner, segments, length, lost: None, pages: None }
    }

    /// A view of `segments` that are shared with another process (a guest), kept alive by `owner`.
    /// The bytes may change at any time, and a guest may name the same bytes twice. So no function
    /// here makes a reference to them, and copies access each byte atomically.
    ///
    /// If bytes of the memory vanish, `lost` must be set before other bytes are visible in their
    /// place. All shared memory that is ever joined with this vector ([`chain`](Self::chain)) must
    /// have the same `lost`.
    ///
    /// # Safety
    /// Each segment must stay valid for reads and writes as long as `owner` lives, and so must
    /// `lost` be. During that time no reference to the bytes may exist, and all accesses to them in
    /// this process are atomic or through [`copy_from_shared`](crate::copy_from_shared) and the
    /// other functions of its module.
    pub unsafe fn from_shared(
        owner: Arc<dyn Any + Send + std::marker::Sync>,
        segments: impl IntoIterator<Item = Segment>,
        lost: &AtomicBool,
    ) -> Self {
        // SAFETY: the caller guarantees it. Other views may exist, because all copies are atomic.
        let vector = unsafe { Self::from_raw(owner, segments) };
        Self { lost: Some(NonNull::from_ref(lost)), ..vector }
    }

    /// Whether another process shares the bytes, and may change them at any time. Also true after a
    /// cut past the end, and after a join with a vector that was not intact.
    pub fn is_shared(&self) -> bool {
        self.lost.is_some()
    }

    /// Whether all bytes copied from the vector so far are the owner's bytes. False if shared
    /// memory has vanished (its bytes read as zeros), after a cut past the end, or if the bytes
    /// could not be copied from the kernel's pages. A part or a join of vectors that are not intact
    /// is not intact either.
    #[inline]
    pub fn is_intact(&self) -> bool {
        if self.pages.as_ref().is_some_and(|pages| pages.is_lost()) {
            return false;
        }
        let Some(lost) = self.lost else { return true };
        // Orders the reads of the copied bytes before the read of the flag.
        fence(Ordering::Acquire);
        // SAFETY: `lost` lives as long as the owner (`from_shared`), or is a static.
        !unsafe { lost.as_ref() }.load(Ordering::Relaxed)
    }

    /// [`is_intact`](Self::is_intact), for a request that must fail otherwise.
    ///
    /// # Errors
    /// EFAULT, as the kernel returns for such memory.
    pub fn check_intact(&self) -> Result<()> {
        if self.is_intact() {
            return Ok(());
        }
        let error = std::io::Error::from_raw_os_error(errno::EFAULT);
        Err(Error::host("cannot take a request's data from its memory", error))
    }

    /// The same bytes, with `guard` as a further owner, dropped with the last part of the vector.
    /// An operation keeps its vector until it completes, so the guard outlives the operation even
    /// if the future that waits for it is dropped.
    #[must_use]
    pub fn with_guard(self, guard: impl Any + Send + std::marker::Sync) -> Self {
        Self { owner: Arc::new((self.owner, guard)), ..self }
    }

    /// Joins two vectors: the bytes of `self`, then the bytes of `next`.
    #[must_use]
    pub fn chain(mut self, next: Self) -> Self {
        if next.is_empty() && next.is_intact() {
            return self;
        }
        if self.is_empty() && self.is_intact() {
            return next;
        }
        self.is_in_memory();
        next.is_in_memory();
        let are_intact = self.is_intact() && next.is_intact();
        let lost = if are_intact { self.lost.or(next.lost) } else { Some((&ALWAYS_LOST).into()) };
        // Of pages that were left, only the fact that they are lost matters.
        let pages = [self.pages, next.pages].into_iter().flatten().find(|pages| pages.is_lost());
        self.segments.extend_from_slice(&next.segments);
        // Parts of one vector share its owner, so joining thousands of them nests no owners.
        let owner = if Arc::ptr_eq(&self.owner, &next.owner) {
            self.owner
        } else {
            Arc::new((self.owner, next.owner))
        };
        Self { owner, segments: self.segments, length: self.length + next.length, lost, pages }
    }

    /// The total length in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The segments, none of them empty. The addresses are for the kernel, which may access the
    /// bytes as long as the vector exists. There are none if the bytes could not be copied from the
    /// kernel's pages.
    #[inline]
    pub fn segments(&self) -> &[Segment] {
        if self.is_in_memory() { &self.segments } else { &[] }
    }

    /// Whether every address is a multiple of `memory`, and every length except the last is a
    /// multiple of `length` (both powers of two).
    pub fn is_aligned(&self, memory: usize, length: usize) -> bool {
        let Some((last, others)) = self.segments.split_last() else { return true };
        let address_bits = |segment: &Segment| segment.address.as_ptr().addr() & (memory - 1);
        address_bits(last) == 0
            && others.iter().all(|one| address_bits(one) | (one.length & (length - 1)) == 0)
    }

    /// Drops the first `count` bytes. If the vector is shorter, it becomes empty, and is [not
    /// intact](Self::is_intact).
    pub fn advance(&mut self, mut count: usize) {
        if count > self.length {
            count = self.length;
            self.lost = Some(NonNull::from_ref(&ALWAYS_LOST));
        }
        self.pass_in_pages(count);
        self.length -= count;
        let mut whole = 0;
        while count > 0 {
            let segment = &mut self.segments[whole];
            if count < segment.length {
                // SAFETY: `count` is less than the length, so the address stays inside the segment.
                segment.address = unsafe { segment.address.add(count) };
                segment.length -= count;
                break;
            }
            count -= segment.length;
            whole += 1;
        }
        self.segments.drain(..whole);
    }

    /// Divides the vector: `self` keeps the first `at` bytes, the result has the others. If there
    /// are fewer than `at`, the result is empty, and neither vector is [intact](Self::is_intact).
    #[must_use]
    pub fn split_off(&mut self, mut at: usize) -> Self {
        if at > self.length {
            at = self.length;
            self.lost = Some(NonNull::from_ref(&ALWAYS_LOST));
        }
        self.is_in_memory();
        let mut kept = SmallVec::new();
        let mut rest = SmallVec::new();
        let mut left = at;
        for &segment in &self.segments {
            let here = left.min(segment.length);
            if here > 0 {
                kept.push(Segment { length: here, ..segment });
            }
            if here < segment.length {
                // SAFETY: `here` is less than the segment's length, so the address stays inside
                // the memory that `from_raw` was given.
                let address = unsafe { segment.address.add(here) };
                rest.push(Segment { address, length: segment.length - here });
            }
            left -= here;
        }
        let (owner, length) = (Arc::clone(&self.owner), self.length - at);
        let pages = self.pages.clone();
        let rest = Self { owner, segments: rest, length, lost: self.lost, pages };
        self.segments = kept;
        self.length = at;
        rest
    }

    /// The segments, until memory is lost: after that, access to each further segment may cause a
    /// fault.
    fn intact_segments(&self) -> impl Iterator<Item = &Segment> {
        self.segments().iter().take_while(|_| self.is_intact())
    }

    /// Copies the first bytes of the vector into `bytes`, as many as both have. If shared memory
    /// has vanished ([`check_intact`](Self::check_intact)), zeros take the place of the bytes that
    /// are not copied.
    pub fn copy_to(&self, bytes: &mut [u8]) {
        self.copy_to_from(0, bytes);
    }

    /// As [`copy_to`](Self::copy_to), from the byte `start` on.
    fn copy_to_from(&self, start: usize, bytes: &mut [u8]) {
        let mut done = 0;
        for Segment { address, length } in self.intact_pieces(start, bytes.len()) {
            // SAFETY: `length` bytes of a segment.
            unsafe { self.copy_out(address, &mut bytes[done..done + length]) };
            done += length;
        }
        // The rest is cleared, because `bytes` may have data of an earlier request there.
        let end = (self.length - start).min(bytes.len());
        bytes[done.min(end)..end].fill(0);
    }

    /// The parts of [`intact_segments`](Self::intact_segments) that are among the `length` bytes
    /// from `start` on.
    fn intact_pieces(&self, start: usize, length: usize) -> impl Iterator<Item = Segment> {
        let (mut skipped, mut left) = (start, length);
        self.intact_segments().map_while(move |segment| {
            let from = skipped.min(segment.length);
            let count = left.min(segment.length - from);
            (skipped, left) = (skipped - from, left - count);
            // SAFETY: `from` is not after the end of the segment.
            let address = unsafe { segment.address.add(from) };
            (count > 0 || left > 0).then_some(Segment { address, length: count })
        })
    }

    /// # Safety
    /// `source` has at least as many bytes as `target`, all in one segment.
    unsafe fn copy_out(&self, source: NonNull<u8>, target: &mut [u8]) {
        let (source, target, count) = (source.as_ptr(), target.as_mut_ptr(), target.len());
        // SAFETY: the source is valid (`from_raw`). No reference to a segment's bytes exists, so
        // source and target do not overlap. Private bytes belong to this vector only;
        // `copy_from_shared` copies shared bytes.
        unsafe {
            match self.lost {
                None => ptr::copy_nonoverlapping(source, target, count),
                Some(_) => copy_from_shared(source, target, count),
            }
        }
    }

    /// Whether every byte is zero. Stops at the first byte that is not. Shared memory that has
    /// vanished is treated as zeros: see [`is_intact`](Self::is_intact).
    pub fn is_zero(&self) -> bool {
        self.is_zero_at(0, self.length)
    }

    /// As [`is_zero`](Self::is_zero), for at most `length` bytes from `start` on.
    pub fn is_zero_at(&self, start: usize, length: usize) -> bool {
        // The first few bytes usually decide. Later chunks stay in the processor's L1 cache.
        let mut chunk = [0; 4096];
        let mut size = 64;
        let (mut skipped, mut left) = (start, length);
        for segment in self.intact_segments() {
            let mut done = skipped.min(segment.length);
            skipped -= done;
            let end = done + left.min(segment.length - done);
            left -= end - done;
            while done < end {
                let piece = &mut chunk[..size.min(end - done)];
                // SAFETY: `done` with the piece is inside of the segment.
                unsafe { self.copy_out(segment.address.add(done), piece) };
                if piece.iter().fold(0, |sum, byte| sum | byte) != 0 {
                    return false;
                }
                done += piece.len();
                size = chunk.len();
            }
        }
        true
    }

    /// Copies `bytes` over the first bytes of the vector, as many as both have. Stops where shared
    /// memory has vanished.
    pub fn copy_from(&mut self, bytes: &[u8]) {
        self.copy_from_to(bytes, 0);
    }

    /// As [`copy_from`](Self::copy_from), over the bytes from `start` on.
    fn copy_from_to(&mut self, bytes: &[u8], start: usize) {
        let mut done = 0;
        for Segment { address, length } in self.intact_pieces(start, bytes.len()) {
            let (source, target) = (bytes[done..done + length].as_ptr(), address.as_ptr());
            // SAFETY: as in `copy_out`, with the roles exchanged.
            unsafe {
                match self.lost {
                    None => ptr::copy_nonoverlapping(source, target, length),
                    Some(_) => copy_to_shared(source, target, length),
                }
            }
            done += length;
        }
    }

    /// Sets every byte. Stops where shared memory has vanished.
    pub fn fill(&mut self, byte: u8) {
        for &Segment { address, length } in self.intact_segments() {
            // SAFETY: the segment is valid for writes (`from_raw`). Private bytes belong to this
            // vector only; `fill_shared` sets shared bytes.
            unsafe {
                match self.lost {
                    None => ptr::write_bytes(address.as_ptr(), byte, length),
                    Some(_) => fill_shared(address.as_ptr(), byte, length),
                }
            }
        }
    }
}

impl std::fmt::Debug for IoVector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "IoVector({} bytes in {} segments)", self.length, self.segments.len())
    }
}

/// Vectors of several owners, one after the other, for one socket operation. A list that is kept
/// and used again allocates nothing.
#[derive(Default, Debug)]
pub struct IoVectorList {
    vectors: Vec<IoVector>,
    segments: Vec<Segment>,
    /// How many segments are passed over completely.
    done: usize,
    length: usize,
}

// SAFETY: `segments` only repeats the segments of `vectors`, which are `Send`.
unsafe impl Send for IoVectorList {}

impl IoVectorList {
    /// An empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a vector.
    pub fn push(&mut self, vector: IoVector) {
        self.length += vector.len();
        self.segments.extend_from_slice(vector.segments());
        self.vectors.push(vector);
    }

    /// Drops all vectors and with them the loans.
    pub fn clear(&mut self) {
        self.segments.clear();
        self.vectors.clear();
        (self.done, self.length) = (0, 0);
    }

    /// Takes all vectors out, each with all of its bytes, including those passed over.
    pub fn take_vectors(&mut self) -> impl Iterator<Item = IoVector> + '_ {
        self.segments.clear();
        (self.done, self.length) = (0, 0);
        self.vectors.drain(..)
    }

    /// How many bytes are left.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The segments that are left, none of them empty. For the kernel, as [`IoVector::segments`].
    pub fn segments(&self) -> &[Segment] {
        &self.segments[self.done..]
    }

    /// Copies the first bytes that are left into `bytes`, as many as both have. Returns their
    /// number. As [`IoVector::copy_to`].
    pub fn copy_to(&self, bytes: &mut [u8]) -> usize {
        let mut passed = self.passed();
        let mut done = 0;
        for vector in &self.vectors {
            let start = passed.min(vector.len());
            let end = (done + vector.len() - start).min(bytes.len());
            vector.copy_to_from(start, &mut bytes[done..end]);
            (passed, done) = (passed - start, end);
        }
        done
    }

    /// Copies `bytes` over the first bytes that are left, as many as both have. As
    /// [`IoVector::copy_from`].
    pub fn copy_from(&mut self, bytes: &[u8]) {
        let mut passed = self.passed();
        let mut done = 0;
        for vector in &mut self.vectors {
            let start = passed.min(vector.len());
            let end = (done + vector.len() - start).min(bytes.len());
            vector.copy_from_to(&bytes[done..end], start);
            (passed, done) = (passed - start, end);
        }
    }

    /// How many bytes were passed over.
    fn passed(&self) -> usize {
        self.vectors.iter().map(IoVector::len).sum::<usize>() - self.length
    }

    /// Passes over the first `count` bytes that are left, or all of them. Their memory stays owned
    /// until [`clear`](Self::clear).
    pub fn advance(&mut self, count: usize) {
        let mut count = count.min(self.length);
        self.length -= count;
        while count > 0 {
            let segment = &mut self.segments[self.done];
            let here = count.min(segment.length);
            count -= here;
            if here == segment.length {
                self.done += 1;
            } else {
                // SAFETY: `here` is less than the length, so the address stays inside the segment.
                segment.address = unsafe { segment.address.add(here) };
                segment.length -= here;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_advances_across_its_vectors() {
        let mut list = IoVectorList::new();
        list.push(sample());
        list.push(sample());
        list.advance(10);
        assert_eq!((list.len(), list.segments().len(), list.segments()[0].length), (22, 4, 6));
        list.advance(22);
        assert!(list.is_empty() && list.segments().is_empty());
    }

    #[test]
    fn what_is_left_of_a_list_is_copied() {
        for passed in 0..=32 {
            for count in 0..=32 {
                let mut list = IoVectorList::new();
                list.push(sample());
                list.push(sample());
                list.advance(passed);
                let expected: Vec<u8> = (0..16).chain(0..16).skip(passed).take(count).collect();
                let mut copied = vec![0xff; count];
                assert_eq!(list.copy_to(&mut copied), expected.len());
                assert_eq!(copied[..expected.len()], expected);
                assert!(copied[expected.len()..].iter().all(|&byte| byte == 0xff));
                list.copy_from(&vec![0xaa; count]);
                let all: Vec<u8> = list.take_vectors().flat_map(|vector| bytes(&vector)).collect();
                let was_copied = |at: usize| (passed..passed + count).contains(&at);
                for (at, byte) in all.into_iter().enumerate() {
                    assert_eq!(byte, if was_copied(at) { 0xaa } else { at as u8 % 16 });
                }
            }
        }
    }

    /// Three segments of 3, 5 and 8 bytes, holding 0..16.
    fn sample() -> IoVector {
        let memory: Arc<[std::sync::atomic::AtomicU8; 16]> =
            Arc::new(std::array::from_fn(|i| std::sync::atomic::AtomicU8::new(i as u8)));
        let base = NonNull::new(memory.as_ptr().cast_mut().cast::<u8>()).unwrap();
        let piece = |start: usize, length| {
            // SAFETY: start + length is at most 16, the length of the array.
            Segment { address: unsafe { base.add(start) }, length }
        };
        let segments = [piece(0, 3), piece(3, 5), piece(8, 8)];
        // SAFETY: the array is interior-mutable, lives as long as the Arc, and is not used
        // otherwise.
        unsafe { IoVector::from_raw(memory, segments) }
    }

    fn bytes(vector: &IoVector) -> Vec<u8> {
        let mut bytes = vec![0; vector.len()];
        vector.copy_to(&mut bytes);
        bytes
    }

    #[test]
    fn dividing_anywhere_keeps_every_byte_in_order() {
        for at in 0..=16 {
            let mut head = sample();
            let tail = head.split_off(at);
            assert_eq!(head.len(), at);
            let mut all = bytes(&head);
            all.extend(bytes(&tail));
            assert_eq!(all, (0..16).collect::<Vec<u8>>());
        }
    }

    #[test]
    fn advancing_drops_the_first_bytes() {
        for count in 0..=16u8 {
            let mut vector = sample();
            vector.advance(count.into());
            assert_eq!(vector.len(), 16 - usize::from(count));
            assert_eq!(bytes(&vector), (count..16).collect::<Vec<u8>>());
            assert!(vector.segments().iter().all(|segment| segment.length > 0));
        }
    }

    #[test]
    fn two_vectors_in_a_row_are_one() {
        let (mut one, guard) = (sample(), Arc::new(()));
        drop(one.split_off(4));
        let joined = one.chain(sample().with_guard(Arc::clone(&guard)));
        assert_eq!((joined.len(), joined.segments().len()), (20, 5));
        assert_eq!(bytes(&joined), (0..4).chain(0..16).collect::<Vec<u8>>());
        assert_eq!(Arc::strong_count(&guard), 2, "both owners are kept");
    }

    #[test]
    fn a_vector_joined_from_one_that_is_not_intact_is_not_intact() {
        let is_lost = AtomicBool::new(false);
        let shared = || {
            let IoVector { owner, segments, .. } = sample();
            // SAFETY: the segments live as long as `owner`, and the flag until the test ends.
            unsafe { IoVector::from_shared(owner, segments, &is_lost) }
        };
        let cut = |at| {
            let mut vector = sample();
            drop(vector.split_off(17));
            vector.advance(at);
            vector
        };
        assert!(shared().chain(sample()).is_intact());
        for at in [0, 16] {
            assert!(!cut(at).chain(sample()).is_intact() && !sample().chain(cut(at)).is_intact());
            assert!(!cut(at).chain(shared()).is_intact() && !shared().chain(cut(at)).is_intact());
        }
    }

    #[test]
    fn a_guard_lives_as_long_as_the_last_part() {
        let guard = Arc::new(());
        let mut head = sample().with_guard(Arc::clone(&guard));
        let tail = head.split_off(5);
        drop(head);
        assert_eq!((Arc::strong_count(&guard), bytes(&tail)), (2, (5..16).collect()));
        drop(tail);
        assert_eq!(Arc::strong_count(&guard), 1);
    }

    #[test]
    fn copies_cross_segments() {
        let mut vector = sample();
        vector.copy_from(&[9; 6]);
        assert_eq!(bytes(&vector)[..8], [9, 9, 9, 9, 9, 9, 6, 7]);
        vector.fill(1);
        assert_eq!(bytes(&vector), [1; 16]);
    }

    #[test]
    fn shared_memory_is_copied_and_tells_when_it_has_vanished() {
        struct Shared([std::sync::atomic::AtomicU8; 600], AtomicBool);
        let memory = Arc::new(Shared(std::array::from_fn(|_| 0.into()), AtomicBool::new(false)));
        let address = NonNull::new(memory.0.as_ptr().cast_mut().cast::<u8>()).unwrap();
        let segment = Segment { address, length: 600 };
        // SAFETY: atomics, which may be changed by reference, and a flag that lives as long.
        let mut vector = unsafe { IoVector::from_shared(memory.clone(), [segment], &memory.1) };
        assert!(vector.is_zero());
        vector.copy_from(&(0..600).map(|index| index as u8).collect::<Vec<_>>());
        assert_eq!(bytes(&vector), (0..600).map(|index| index as u8).collect::<Vec<_>>());
        vector.fill(7);
        let tail = vector.split_off(300);
        let joined = sample().chain(tail).with_guard(());
        assert_eq!((bytes(&vector), bytes(&joined)[16..].to_vec()), (vec![7; 300], vec![7; 300]));
        assert!(vector.is_intact() && joined.check_intact().is_ok() && sample().is_intact());
        memory.1.store(true, Ordering::Relaxed);
        vector.fill(8);
        vector.copy_from(&[8; 300]);
        assert_eq!(memory.0[0].load(Ordering::Relaxed), 7, "lost memory is not touched");
        let mut copied = [9; 301];
        vector.copy_to(&mut copied);
        assert_eq!((&copied[..300], copied[300]), (&[0; 300][..], 9), "nor copied");
        assert!(vector.is_zero(), "nor looked at");
        drop(memory);
        assert!(!vector.is_intact() && sample().is_intact());
        assert_eq!(joined.check_intact().unwrap_err().errno(), errno::EFAULT);
    }

    #[test]
    fn one_byte_that_is_not_zero_is_seen_wherever_it_is() {
        for length in [1, 63, 64, 65, 4159, 4160, 4161, 10_000] {
            let mut buffer = crate::Buffer::new(length);
            assert!(buffer.lend().is_zero());
            for at in [0, length / 2, length - 1] {
                buffer.bytes_mut()[at] = 0x80;
                assert!(!buffer.lend().is_zero(), "{at} of {length}");
                buffer.bytes_mut()[at] = 0;
            }
        }
        let mut segments = sample();
        assert!(!segments.is_zero());
        segments.fill(0);
        assert!(segments.is_zero() && segments.split_off(16).is_zero());
        let mut part = sample();
        part.copy_from(&[1, 1, 0, 0, 0, 0, 1]);
        assert!(part.is_zero_at(2, 4) && !part.is_zero_at(2, 5) && !part.is_zero_at(1, 5));
        assert!(part.is_zero_at(16, 9) && part.is_zero_at(7, 0) && !part.is_zero_at(7, 99));
    }

    #[test]
    fn what_is_cut_past_the_end_is_not_intact() {
        let mut divided = sample();
        let rest = divided.split_off(17);
        assert_eq!((divided.len(), rest.len()), (16, 0));
        assert!(divided.check_intact().is_err() && rest.check_intact().is_err());
        let mut passed = sample();
        passed.advance(16);
        assert!(passed.is_empty() && passed.check_intact().is_ok());
        passed.advance(1);
        assert_eq!(passed.check_intact().unwrap_err().errno(), errno::EFAULT);
        let mut list = IoVectorList::new();
        list.push(sample());
        list.advance(17);
        assert!(list.is_empty() && list.segments().is_empty());
    }
}
