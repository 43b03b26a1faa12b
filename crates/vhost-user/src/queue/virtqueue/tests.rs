//! Which pages of a virtqueue are marked in the dirty log, and when.

use blockhouse_engine::{GuestRange, GuestRegion, SharedMemory, VolatileSlice};

use super::*;
use crate::ring::EventIndex;

/// Where the ring's parts are in the memory, whose first byte has the guest's address 0.
const AVAILABLE: u64 = 4096;
const USED: u64 = 8192;
const ENTRIES: u16 = 8;
const STATUS: u64 = 12288;

/// A ring whose dirty log lies in the guest's memory: the byte at `marked`, inside a field that the
/// ring stores, is the log's byte for the page of the used ring. The store of the field erases a
/// mark that was set before it, so tests see the order.
fn ring_with_its_mark_at(marked: u64, event_index: EventIndex) -> (Virtqueue, Arc<GuestMemory>) {
    let domain = FaultDomain::unconnected();
    let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 16384).unwrap();
    let shared = Arc::new(SharedMemory::map(&file, 0, 16384, &domain).unwrap());
    let mut memory = GuestMemory::new();
    assert!(memory.add(GuestRegion { guest: 0, user_addr: 0, memory: Arc::clone(&shared) }));
    let memory = Arc::new(memory);
    let addresses = RingAddresses { descriptors: 0, available: AVAILABLE, used: USED };
    let ring = SplitRing::new(&memory, addresses, ENTRIES, 0, event_index).unwrap();
    let mut queue = Virtqueue::new(ring, Arc::clone(&memory), domain, None, Vec::new());
    // The pages of these tests are the first four: they share one byte of the log.
    let log = VolatileSlice::new(shared, marked as usize, 1).unwrap();
    queue.set_log(Some(DirtyLog::new(log)), Some(USED), None);
    (queue, memory)
}

/// Whether the page of the used ring is marked.
fn is_marked(memory: &GuestMemory, at: u64) -> bool {
    let mut byte = [0];
    assert!(memory.read(at, &mut byte));
    byte[0] & 1 << (USED / 4096) != 0
}

fn complete(queue: &mut Virtqueue, memory: &Arc<GuestMemory>, written: u64) {
    let writable = [GuestRange { address: 0, length: 4096 }].into_iter().collect();
    let chain = Chain::with_writable(writable, STATUS);
    let element = Element { head: 3, memory: Arc::clone(memory) };
    let outcome = Outcome { status: Status::Ok, written };
    queue.complete(&element, &chain, outcome, CompletionKind::Async);
}

#[test]
fn an_element_of_the_used_ring_is_marked_after_it_was_stored() {
    // The second byte of the element's head, which the store clears.
    let at = USED + 4 + 1;
    let (mut queue, memory) = ring_with_its_mark_at(at, EventIndex::Absent);
    complete(&mut queue, &memory, 0);
    assert!(is_marked(&memory, at));
}

#[test]
fn the_index_of_the_used_ring_is_marked_after_it_was_stored() {
    let at = USED + 3;
    let (mut queue, memory) = ring_with_its_mark_at(at, EventIndex::Absent);
    complete(&mut queue, &memory, 0);
    queue.publish();
    assert!(is_marked(&memory, at));
}

#[test]
fn notification_fields_are_marked_after_they_were_stored() {
    for (event_index, offset) in
        [(EventIndex::Absent, 0), (EventIndex::Negotiated, 4 + 8 * u64::from(ENTRIES))]
    {
        // The upper byte, which every store here clears.
        let at = USED + offset + 1;
        let (mut queue, memory) = ring_with_its_mark_at(at, event_index);
        assert!(!queue.enable_notify());
        assert!(is_marked(&memory, at), "enabled, {event_index:?}");
        assert!(memory.write(at, &[0]));
        assert!(!queue.enable_notify());
        assert!(!is_marked(&memory, at), "enabled before: nothing is stored");
        if event_index == EventIndex::Absent {
            // A request arrives, and no more kicks are needed.
            assert!(memory.write(AVAILABLE + 2, &[1]));
            assert_eq!(queue.available().unwrap(), 1);
            assert!(is_marked(&memory, at), "disabled");
        }
    }
}

#[test]
fn only_what_was_written_is_marked() {
    for (written, marks) in [(0, 0b1000), (1, 0b1001), (u64::MAX, 0b1001)] {
        let at = 2 * 4096 + 2048;
        let (mut queue, memory) = ring_with_its_mark_at(at, EventIndex::Absent);
        queue.set_log(queue.log.clone(), None, None);
        complete(&mut queue, &memory, written);
        let mut byte = [0];
        assert!(memory.read(at, &mut byte));
        assert_eq!(byte, [marks], "{written} bytes, and the status");
    }
}
