//! Whole pages of a file in our address space. As long as a [`Mapping`] exists, nothing else has its
//! addresses.

use std::os::fd::AsFd;
use std::ptr::{self, NonNull};

use rustix::mm::{MapFlags, ProtFlags};

/// Pages that others may share, unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the object owns its mapping, which is not tied to a thread.
unsafe impl Send for Mapping {}
// SAFETY: it gives out nothing but the address and the length, which never change.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `length` bytes of the file from `offset` on, to be read and written; both are multiples of its
    /// pages. Core files do not get them.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn of(file: impl AsFd, offset: u64, length: usize) -> rustix::io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice touches nobody's memory.
        let mapped = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                &file,
                offset,
            )?
        };
        let start = NonNull::new(mapped.cast()).expect("a mapping is nowhere near address 0");
        let mapping = Self { start, length };
        mapping.leave_out_of_core_files()?;
        Ok(mapping)
    }

    /// Keeps the pages out of core files (`MADV_DONTDUMP`): they hold what a guest has in its memory.
    fn leave_out_of_core_files(&self) -> rustix::io::Result<()> {
        // SAFETY: the mapping is this object's own. Neither its content nor its pages change.
        unsafe {
            let start = self.start.as_ptr().cast();
            rustix::mm::madvise(start, self.length, rustix::mm::Advice::LinuxDontDump)
        }
    }

    /// Has the kernel take all pages now that nobody has touched yet. Where it cannot, they are taken when
    /// they are touched, as always.
    pub(crate) fn populate(&self) {
        // SAFETY: the mapping is this object's own. Pages come to be there, and none changes its content.
        let _ = unsafe {
            let start = self.start.as_ptr().cast();
            rustix::mm::madvise(start, self.length, rustix::mm::Advice::LinuxPopulateWrite)
        };
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(crate) fn length(&self) -> usize {
        self.length
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this object's own, and nothing that refers to it outlives it: who uses
        // the bytes, and a ring that has them in a slot, own it. It fails only for a mapping that is not
        // there.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.length) };
    }
}
