//! A table of mapped front-end memory by address, for look-ups by a signal handler.
//!
//! The table has a fixed number of slots. A look-up takes no lock and does not wait, so a handler
//! may interrupt any code. A mutex serialises only changes. A slot is written between two changes
//! of its version (a sequence lock). A thread that faults keeps the accessed mapping alive, so the
//! slot of this mapping does not change meanwhile: a slot that changes during a look-up belongs to
//! another mapping and is skipped.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, fence};

use parking_lot::Mutex;

use super::fault_domain::FaultDomain;

/// Maximum number of mappings: a quarter of the kernel's default limit for a process
/// (`vm.max_map_count`). The rest is left for replaced pages, which divide mappings.
pub(super) const MAX_MAPPINGS: usize = 1 << 14;

/// All mappings of this process.
pub(super) static MAPPINGS: Registry<MAX_MAPPINGS> = Registry::new();

/// The pages of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pages {
    /// Address of the first byte.
    pub(super) start: usize,
    /// Bytes, at least one.
    pub(super) length: usize,
    /// Bytes of a page, a power of two. The start is a multiple of it.
    pub(super) page: usize,
}

impl Pages {
    /// The address of the page that `address` is in.
    pub(super) fn page_of(&self, address: usize) -> usize {
        address & !(self.page - 1)
    }
}

/// A mapping's slot.
pub(super) struct Registration(u32);

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slot {}", self.0)
    }
}

/// A slot, which is empty while `length` is 0.
struct Slot {
    /// Odd while the other fields change.
    version: AtomicU32,
    start: AtomicUsize,
    length: AtomicUsize,
    page: AtomicUsize,
    domain: AtomicPtr<FaultDomain>,
}

/// A table of `N` slots.
pub(super) struct Registry<const N: usize> {
    slots: [Slot; N],
    /// Slots from here on have never been used.
    used: AtomicUsize,
    /// The empty slots below `used`.
    free: Mutex<Vec<u32>>,
}

impl<const N: usize> Registry<N> {
    /// An empty table. In a static, pages of slots that were never used take no memory.
    pub(super) const fn new() -> Self {
        Self {
            slots: [const { Slot::empty() }; N],
            used: AtomicUsize::new(0),
            free: Mutex::new(Vec::new()),
        }
    }

    /// Records a mapping that was not accessed yet; `None` if all slots are in use. The domain must
    /// live until [`remove`](Self::remove).
    pub(super) fn insert(&self, pages: Pages, domain: &Arc<FaultDomain>) -> Option<Registration> {
        let mut free = self.free.lock();
        let index = match free.pop() {
            Some(index) => index as usize,
            None => Some(self.used.load(Relaxed)).filter(|&used| used < N)?,
        };
        self.slots[index].write(pages, Arc::as_ptr(domain).cast_mut());
        // `used` rises last, so look-ups see only complete slots. The lock keeps other inserts
        // from this slot.
        self.used.fetch_max(index + 1, Release);
        Some(Registration(index as u32))
    }

    /// Removes a mapping that is no longer accessed.
    pub(super) fn remove(&self, registration: &Registration) {
        let mut free = self.free.lock();
        let none = Pages { start: 0, length: 0, page: 1 };
        self.slots[registration.0 as usize].write(none, std::ptr::null_mut());
        free.push(registration.0);
    }

    /// The mapping with this address, and its domain. Async-signal-safe. Always finds a mapping
    /// that the current thread keeps alive; others may be missed while they are added or removed.
    pub(super) fn find(&self, address: usize) -> Option<(Pages, *const FaultDomain)> {
        let used = self.used.load(Acquire).min(N);
        self.slots[..used].iter().filter_map(Slot::read).find(|(pages, _)| {
            address.checked_sub(pages.start).is_some_and(|offset| offset < pages.length)
        })
    }
}

impl Slot {
    const fn empty() -> Self {
        Self {
            version: AtomicU32::new(0),
            start: AtomicUsize::new(0),
            length: AtomicUsize::new(0),
            page: AtomicUsize::new(0),
            domain: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    /// Writes the slot. The caller holds the registry's lock.
    fn write(&self, pages: Pages, domain: *mut FaultDomain) {
        let version = self.version.load(Relaxed);
        self.version.store(version.wrapping_add(1), Relaxed);
        // A reader that loads the old version, and then one of the values below, sees another
        // version at its second load.
        fence(Release);
        self.start.store(pages.start, Relaxed);
        self.length.store(pages.length, Relaxed);
        self.page.store(pages.page, Relaxed);
        self.domain.store(domain, Relaxed);
        self.version.store(version.wrapping_add(2), Release);
    }

    /// The content, if it did not change during the read.
    fn read(&self) -> Option<(Pages, *const FaultDomain)> {
        let version = self.version.load(Acquire);
        let (start, length) = (self.start.load(Relaxed), self.length.load(Relaxed));
        let (page, domain) = (self.page.load(Relaxed), self.domain.load(Relaxed));
        fence(Acquire);
        let is_whole = version.is_multiple_of(2) && self.version.load(Relaxed) == version;
        is_whole.then_some((Pages { start, length, page }, domain.cast_const()))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    fn pages(start: usize) -> Pages {
        Pages { start, length: 8192, page: 4096 }
    }

    #[test]
    fn mappings_are_found_by_their_addresses_while_they_exist() {
        let (registry, domain) = (Registry::<3>::new(), FaultDomain::unconnected());
        let insert = |start| registry.insert(pages(start), &domain);
        let (one, two) = (insert(0x10000).unwrap(), insert(0x20000).unwrap());
        let _three = insert(0x30000).unwrap();
        assert!(insert(0x40000).is_none(), "it is full");
        for (address, start) in [(0x10000, Some(0x10000)), (0x11fff, Some(0x10000))]
            .into_iter()
            .chain([(0x12000, None), (0xffff, None), (0x21234, Some(0x20000)), (0, None)])
        {
            let found = registry.find(address);
            assert_eq!(found.map(|(pages, _)| pages.start), start, "{address:#x}");
            assert!(found.is_none_or(|(_, found)| found == Arc::as_ptr(&domain)));
        }
        assert_eq!(pages(0x20000).page_of(0x21234), 0x21000);
        registry.remove(&one);
        assert!(registry.find(0x10000).is_none());
        let again = insert(0x40000).unwrap();
        assert!(registry.find(0x41000).is_some());
        registry.remove(&two);
        registry.remove(&again);
        assert!(registry.find(0x20000).is_none() && registry.find(0x30000).is_some());
    }

    #[test]
    fn a_mapping_is_found_while_others_come_and_go() {
        static REGISTRY: Registry<8> = Registry::new();
        let domain = FaultDomain::unconnected();
        // The others get the first slots, which a look-up reads before ours.
        let first = [0x60_0000, 0x70_0000].map(|at| REGISTRY.insert(pages(at), &domain).unwrap());
        let ours = REGISTRY.insert(pages(0x50_0000), &domain).unwrap();
        first.iter().for_each(|registration| REGISTRY.remove(registration));
        let stop = AtomicBool::new(false);
        let wrong = std::thread::scope(|scope| {
            for thread in 1..=2 {
                let (stop, domain) = (&stop, &domain);
                scope.spawn(move || {
                    // A torn read, with the start of one or of an empty slot and the length of
                    // another, would have our address.
                    for start in [0x10_0000 * thread, 0x90_0000 * thread].into_iter().cycle() {
                        let length = if start > 0x50_0000 { 0x60_0000 } else { 8192 };
                        let pages = Pages { start, length, page: 4096 };
                        let registration = REGISTRY.insert(pages, domain).expect("room");
                        REGISTRY.remove(&registration);
                        if stop.load(Relaxed) {
                            return;
                        }
                    }
                });
            }
            let mut found = (0..300_000).map(|_| REGISTRY.find(0x50_1000).map(|(pages, _)| pages));
            let wrong = found.find(|found| *found != Some(pages(0x50_0000)));
            stop.store(true, Relaxed);
            wrong
        });
        assert_eq!(wrong, None);
        REGISTRY.remove(&ours);
    }
}
