//! Maps whole pages of another process's file. As long as a [`Mapping`] exists, nothing else has
//! its addresses.
//!
//! Another process controls the pages: they vanish when it truncates the file, or when the host has
//! no page for a hole (huge pages, a full tmpfs). An access then raises SIGBUS, whose default
//! action ends the process. Guarantees:
//! - A fault in a mapping ends the connection of its [`FaultDomain`], and nothing else: the handler
//!   (`sigbus`) maps a page of zeros there, marks the domain and shuts the connection down. However
//!   many pages are lost, the handler divides a domain's mappings a bounded number of times.
//! - The mark is set before the zeros can be seen. So a value that was read is genuine if the
//!   domain is unmarked after the read.
//! - A SIGBUS elsewhere has the effect that it would have without us.
//! - The handler changes only pages of existing mappings: the thread that accessed a mapping owns
//!   it, so meanwhile the mapping cannot be unmapped, nor its `registry` entry changed.
//!
//! The kernel's own accesses (a transfer of io_uring, AIO, `preadv2`) get EFAULT there: no signal,
//! and no mark.

mod fault_domain;
mod registry;
mod sigbus;

use std::io;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

pub use fault_domain::{Fault, FaultDomain};
use rustix::mm::{MapFlags, ProtFlags};

/// Pages that others may share, unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    length: usize,
    domain: Counted,
    registration: registry::Registration,
}

/// A domain in which a mapping is counted until this is dropped.
#[derive(Debug)]
struct Counted(Arc<FaultDomain>);

impl Counted {
    fn in_domain(domain: &Arc<FaultDomain>) -> io::Result<Self> {
        if domain.acquire_mapping() {
            return Ok(Self(Arc::clone(domain)));
        }
        let limit = fault_domain::MAX_DOMAIN_MAPPINGS;
        let what =
            format!("the front-end has {limit} mappings already, with those in use by requests");
        Err(io::Error::new(io::ErrorKind::QuotaExceeded, what))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.release_mapping();
    }
}

// SAFETY: the object owns its mapping, which is not tied to a thread.
unsafe impl Send for Mapping {}
// SAFETY: it gives out nothing but the address, the length and the domain, which never change.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `length` bytes of the file from `offset` on, to be read and written; both are multiples
    /// of `page`, the size of the file's pages. A fault there belongs to `domain`. Core dumps do
    /// not contain the pages.
    ///
    /// # Errors
    /// The kernel's error; `QuotaExceeded` if there are too many mappings, in this process or of
    /// `domain`.
    pub(crate) fn of(
        file: impl AsFd,
        offset: u64,
        length: usize,
        page: usize,
        domain: &Arc<FaultDomain>,
    ) -> io::Result<Self> {
        sigbus::install()?;
        let counted = Counted::in_domain(domain)?;
        // SAFETY: a new mapping at an address of the kernel's choice replaces no other mapping.
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
        let pages = registry::Pages { start: start.addr().get(), length, page };
        let Some(registration) = registry::MAPPINGS.insert(pages, domain) else {
            // SAFETY: it was mapped just now, and is not used anywhere.
            let _ = unsafe { rustix::mm::munmap(mapped, length) };
            let what =
                format!("{} mappings of guests' memory exist already", registry::MAX_MAPPINGS);
            return Err(io::Error::new(io::ErrorKind::QuotaExceeded, what));
        };
        let mapping = Self { start, length, domain: counted, registration };
        mapping.leave_out_of_core_files()?;
        Ok(mapping)
    }

    /// Keeps the pages out of core dumps (`MADV_DONTDUMP`), because they have the guest's memory.
    fn leave_out_of_core_files(&self) -> rustix::io::Result<()> {
        // SAFETY: the mapping is this object's own. Neither its content nor its pages change.
        unsafe {
            let start = self.start.as_ptr().cast();
            rustix::mm::madvise(start, self.length, rustix::mm::Advice::LinuxDontDump)
        }
    }

    /// Makes the kernel allocate all untouched pages now. If that fails, they are allocated at
    /// first access, as usual.
    pub(crate) fn populate(&self) {
        // SAFETY: the mapping is this object's own. Pages are added, and none changes its content.
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

    pub(crate) fn domain(&self) -> &Arc<FaultDomain> {
        &self.domain.0
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Removed from the registry first, so that the handler never finds addresses that were
        // reused.
        registry::MAPPINGS.remove(&self.registration);
        // SAFETY: the mapping is this object's own, and no reference outlives it: users of the
        // bytes, and a ring that has them in a slot, own it. Only a missing mapping is an error.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

#[cfg(test)]
mod tests;
