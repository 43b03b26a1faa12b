//! A fault domain: all memory that one front-end shares with this process, which fails together.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, fence};

/// A fault in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The host has no page there: the file is shorter than it was, or no page was left for a hole.
    NoPage {
        /// The address in this process that was touched.
        address: usize,
    },
    /// The page's memory is broken (a machine check).
    Hardware {
        /// The address in this process that was touched.
        address: usize,
    },
}

impl Fault {
    /// The address in this process that was touched.
    pub fn address(self) -> usize {
        let (Self::NoPage { address } | Self::Hardware { address }) = self;
        address
    }
}

/// Maximum number of pages of a domain that are replaced one by one. Each may divide its mapping in
/// three, and the kernel limits the mappings of a process (`vm.max_map_count`, 65,530 by default).
pub(super) const MAX_REPLACED_PAGES: u32 = 64;

/// Maximum number of mappings of a domain at a time: about four times the regions that a front-end
/// may share (509), since operations keep sets of regions that were replaced.
pub(super) const MAX_DOMAIN_MAPPINGS: usize = 4 * 512;

/// A group of mappings with one user, such as a front-end. A fault in any of the mappings ends that
/// user.
#[derive(Debug)]
pub struct FaultDomain {
    failed: AtomicBool,
    /// The first fault, stored before `failed`.
    address: AtomicUsize,
    is_hardware: AtomicBool,
    /// How many mappings there are.
    mappings: AtomicUsize,
    /// How many pages were replaced one by one, or should have been.
    replaced_pages: AtomicU32,
    /// The connection that is shut down at the first fault.
    connection: Option<OwnedFd>,
}

impl FaultDomain {
    /// A domain whose first fault shuts this connection down, both ways. That wakes tasks that wait
    /// for a message on it, and then [`has_failed`](Self::has_failed) returns true.
    pub fn of_connection(connection: UnixStream) -> Arc<Self> {
        Self::new(Some(connection.into()))
    }

    /// A domain without a connection: a fault only marks it.
    pub fn unconnected() -> Arc<Self> {
        Self::new(None)
    }

    fn new(connection: Option<OwnedFd>) -> Arc<Self> {
        let (failed, address) = (AtomicBool::new(false), AtomicUsize::new(0));
        let (is_hardware, replaced_pages) = (AtomicBool::new(false), AtomicU32::new(0));
        let mappings = AtomicUsize::new(0);
        Arc::new(Self { failed, address, is_hardware, mappings, replaced_pages, connection })
    }

    /// Whether memory of the domain has vanished under an access. `false` means that no value that
    /// this thread has read so far came from a page of zeros in place of a lost one.
    #[inline]
    pub fn has_failed(&self) -> bool {
        // The caller's value must be read before the mark.
        fence(Ordering::Acquire);
        self.failed.load(Ordering::Relaxed)
    }

    /// The first fault.
    pub fn fault(&self) -> Option<Fault> {
        self.failed.load(Ordering::Acquire).then(|| {
            let address = self.address.load(Ordering::Relaxed);
            if self.is_hardware.load(Ordering::Relaxed) {
                Fault::Hardware { address }
            } else {
                Fault::NoPage { address }
            }
        })
    }

    /// The flag that marks the domain as failed, for vectors of its memory.
    pub(crate) fn mark(&self) -> &AtomicBool {
        &self.failed
    }

    /// Marks the domain. Async-signal-safe. If two threads have the first fault at the same time,
    /// the address of one fault and the kind of the other may be recorded.
    pub(super) fn fail(&self, fault: Fault) {
        if !self.failed.load(Ordering::Relaxed) {
            self.address.store(fault.address(), Ordering::Relaxed);
            self.is_hardware.store(matches!(fault, Fault::Hardware { .. }), Ordering::Relaxed);
            self.failed.store(true, Ordering::SeqCst);
        }
    }

    /// Counts a mapping to be made. Returns whether one more is allowed.
    pub(super) fn acquire_mapping(&self) -> bool {
        let next = |count: usize| (count < MAX_DOMAIN_MAPPINGS).then_some(count + 1);
        self.mappings.try_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
    }

    /// Counts a mapping as removed.
    pub(super) fn release_mapping(&self) {
        self.mappings.fetch_sub(1, Ordering::Relaxed);
    }

    /// Counts a page to be replaced alone. Returns whether one more is allowed. Async-signal-safe.
    pub(super) fn may_replace_page(&self) -> bool {
        let next = |count: u32| (count < MAX_REPLACED_PAGES).then_some(count + 1);
        self.replaced_pages.try_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
    }

    /// Shuts the connection down. Async-signal-safe: one system call.
    pub(super) fn disconnect(&self) {
        if let Some(connection) = &self.connection {
            // This fails only for a connection that has ended.
            let _ = rustix::net::shutdown(connection, rustix::net::Shutdown::Both);
        }
    }
}
