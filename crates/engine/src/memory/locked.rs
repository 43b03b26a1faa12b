//! Memory for keys: pages of its own, locked in memory, and wiped when it is dropped.
//!
//! Guarantees: no other value shares the pages; they are left out of core files, are empty in child
//! processes, and are overwritten with zeros before they are returned to the kernel. If the
//! process's limit (`RLIMIT_MEMLOCK`) allows it, they are locked in memory (`mlock`), so that they
//! are never swapped; [`Locked::is_in_memory`] tells whether they are.

use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::sync::atomic::{Ordering, compiler_fence};

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Private pages with the guarantees of this module.
struct Pages {
    start: NonNull<u8>,
    length: usize,
    is_in_memory: bool,
}

// SAFETY: the object owns its pages, which are not tied to a thread.
unsafe impl Send for Pages {}
// SAFETY: a shared reference gives out nothing but the address, the length and a flag, which never
// change.
unsafe impl Sync for Pages {}

impl Pages {
    /// Pages of zeros with at least `length` bytes.
    fn new(length: usize) -> io::Result<Self> {
        let length = length.max(1).next_multiple_of(rustix::param::page_size());
        // SAFETY: a new mapping at an address of the kernel's choice replaces no other mapping.
        let mapped = unsafe {
            let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
            rustix::mm::mmap_anonymous(ptr::null_mut(), length, protection, flags)?
        };
        let start = NonNull::new(mapped.cast()).expect("a mapping is nowhere near address 0");
        let mut pages = Self { start, length, is_in_memory: false };
        // SAFETY: the mapping is this object's own, and neither its content nor its pages change.
        unsafe {
            rustix::mm::madvise(mapped, length, Advice::LinuxDontDump)?;
            rustix::mm::madvise(mapped, length, Advice::LinuxWipeOnFork)?;
            pages.is_in_memory = rustix::mm::mlock(mapped, length).is_ok();
        }
        Ok(pages)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the pages are this object's own, all of them can be written, and nothing refers
        // to them. The writes are volatile, so that the compiler does not leave out writes that
        // nothing reads.
        unsafe {
            let words = self.start.cast::<u64>().as_ptr();
            for index in 0..self.length / size_of::<u64>() {
                words.add(index).write_volatile(0);
            }
            compiler_fence(Ordering::SeqCst);
            // The call fails only for a missing mapping.
            let _ = rustix::mm::munmap(self.start.as_ptr().cast(), self.length);
        }
    }
}

/// A value in memory for keys.
///
/// The code that made the value may have left parts of it on the stack or in registers.
pub struct Locked<T> {
    pages: Pages,
    value: PhantomData<T>,
}

impl<T> Locked<T> {
    /// Moves the value into memory for keys.
    ///
    /// # Errors
    /// The kernel has no memory for it.
    pub fn new(value: T) -> io::Result<Self> {
        const { assert!(align_of::<T>() <= 4096, "a page aligns it") };
        let pages = Pages::new(size_of::<T>())?;
        // SAFETY: the pages are as long as the value, aligned for it, and nothing else refers to
        // them.
        unsafe { pages.start.cast::<T>().write(value) };
        Ok(Self { pages, value: PhantomData })
    }

    /// Whether the kernel keeps the value off the swap devices.
    pub fn is_in_memory(&self) -> bool {
        self.pages.is_in_memory
    }
}

impl<T> Deref for Locked<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: `new` stored a value, which lives until the drop, and is borrowed as this object
        // is.
        unsafe { self.pages.start.cast::<T>().as_ref() }
    }
}

impl<T> Drop for Locked<T> {
    fn drop(&mut self) {
        // SAFETY: `new` stored a value. It is not used afterwards: its pages are unmapped next.
        unsafe { self.pages.start.cast::<T>().drop_in_place() };
    }
}

/// Bytes in memory for keys.
pub struct LockedBytes {
    pages: Pages,
    length: usize,
}

impl LockedBytes {
    /// Memory of this length, full of zeros.
    ///
    /// # Errors
    /// The errors of [`Locked::new`].
    pub fn new(length: usize) -> io::Result<Self> {
        Ok(Self { pages: Pages::new(length)?, length })
    }

    /// A copy of these bytes.
    ///
    /// # Errors
    /// The errors of [`Locked::new`].
    pub fn copy_of(bytes: &[u8]) -> io::Result<Self> {
        let mut copy = Self::new(bytes.len())?;
        copy.copy_from_slice(bytes);
        Ok(copy)
    }

    /// Removes the bytes after the first `length` ones.
    pub fn truncate(&mut self, length: usize) {
        self.length = self.length.min(length);
    }

    /// Whether the kernel keeps the bytes off the swap devices.
    pub fn is_in_memory(&self) -> bool {
        self.pages.is_in_memory
    }
}

impl Deref for LockedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the pages have at least `length` bytes, are filled from the beginning, and
        // borrowed as this object is.
        unsafe { std::slice::from_raw_parts(self.pages.start.as_ptr(), self.length) }
    }
}

impl DerefMut for LockedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`; the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.pages.start.as_ptr(), self.length) }
    }
}

impl std::fmt::Debug for LockedBytes {
    /// Does not print the bytes.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LockedBytes")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The `VmFlags` in `/proc/self/smaps` of the mapping with this address.
    fn flags_of(address: usize) -> String {
        let maps = std::fs::read_to_string("/proc/self/smaps").expect("proc is mounted");
        let mut is_inside = false;
        let mut flags = String::new();
        for line in maps.lines() {
            let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
            let ends = range.and_then(|(start, end)| {
                let hex = |text| usize::from_str_radix(text, 16).ok();
                Some((hex(start)?, hex(end)?))
            });
            match ends {
                Some((start, end)) => is_inside = (start..end).contains(&address),
                None if is_inside => flags += line.strip_prefix("VmFlags:").unwrap_or_default(),
                None => {}
            }
        }
        flags
    }

    #[test]
    fn pages_of_keys_are_locked_and_neither_dumped_nor_inherited() {
        let key = LockedBytes::copy_of(&[7; 64]).expect("a page");
        assert_eq!(key[..], [7; 64]);
        assert!(format!("{key:?}").len() < 20, "no bytes");
        let flags = flags_of(key.as_ptr().addr());
        assert!(flags.contains(" dd") && flags.contains(" wf"), "{flags}");
        assert_eq!(flags.contains(" lo"), key.is_in_memory(), "{flags}");
    }

    #[test]
    fn a_value_is_dropped_once() {
        let counted = std::sync::Arc::new(());
        let locked = Locked::new(std::sync::Arc::clone(&counted)).expect("a page");
        assert_eq!(std::sync::Arc::strong_count(&*locked), 2);
        drop(locked);
        assert_eq!(std::sync::Arc::strong_count(&counted), 1);
    }

    #[test]
    fn what_is_cut_off_is_not_shown() {
        let mut key = LockedBytes::copy_of(b"secret\n").expect("a page");
        key.truncate(6);
        assert_eq!(key[..], *b"secret");
    }
}
