//! Guests whose memory is registered with the rings: their data is right whatever happens to the
//! memory, and the rings know all of it that there is and nothing else.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use blockhouse_engine::{
    Engine, EngineChoice, EventLoop, FaultDomain, SharedMemory, count_registered_buffers,
};
use blockhouse_vhost_user::driver::{DescriptorSpec, GUEST, Options};
use blockhouse_vhost_user::ring::WRITE;
use rustix::fs::{FallocateFlags, MemfdFlags};
use vhost::vhost_user::VhostUserFrontend;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};

use crate::common::*;

const BLOCK: usize = 4096;
/// Where a guest gets more memory.
const MORE: u64 = GUEST << 4;

/// Whether this host has io_uring at all. Without it there is nothing to see here.
fn has_rings() -> bool {
    let event_loop = EventLoop::new(EngineChoice::Only(Engine::IoUring));
    event_loop.inspect_err(|error| eprintln!("skipped: {error}")).is_ok()
}

/// How many slots of this process's rings have `length` bytes.
fn slots_of(length: usize) -> usize {
    count_registered_buffers(Path::new("/proc/self"), length).unwrap()
}

/// Waits until there are this many: loops hear of memory that is gone in their own time.
#[track_caller]
fn assert_slots(length: usize, count: usize) {
    let end = std::time::Instant::now() + LONG;
    while slots_of(length) != count && std::time::Instant::now() < end {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert_eq!(slots_of(length), count);
}

/// More memory for a guest, at [`MORE`].
struct More {
    file: OwnedFd,
    memory: SharedMemory,
}

impl More {
    fn new(length: usize) -> Self {
        let file = rustix::fs::memfd_create("more", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, length as u64).unwrap();
        let memory = SharedMemory::map(&file, 0, length, &FaultDomain::unconnected()).unwrap();
        Self { file, memory }
    }

    fn region(&self) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: MORE,
            memory_size: self.memory.len() as u64,
            userspace_addr: 0x6000_0000_0000,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        }
    }

    /// Has the first block read from the disk into the second block of this memory.
    fn read(&self, guest: &mut Guest, queue: usize) -> Vec<u8> {
        let data =
            DescriptorSpec { address: MORE + BLOCK as u64, length: BLOCK as u32, flags: WRITE };
        assert_eq!(guest.request(queue, IN, 0, &[data]), OK);
        let mut bytes = vec![0; BLOCK];
        self.memory.read(BLOCK, &mut bytes);
        bytes
    }

    /// Has the first block written to the disk from the first block of this memory.
    fn write(&self, guest: &mut Guest, queue: usize, mark: u8) {
        self.memory.write(0, &[mark; BLOCK]);
        let data = DescriptorSpec { address: MORE, length: BLOCK as u32, flags: 0 };
        assert_eq!(guest.request(queue, OUT, 0, &[data]), OK);
    }

    /// Gives all pages back to the host, as a balloon does.
    fn take_pages(&self) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.file, flags, 0, self.memory.len() as u64).unwrap();
    }
}

#[test]
fn requests_go_by_registered_pages_only_if_that_is_wanted() {
    if !has_rings() {
        return;
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let off = Served::with(1, 1, Default::default(), folder);
    for (served, found) in [(Served::registered(1, 1), 0), (off, 7)] {
        let mut guest = served.connect(Options::default());
        assert_eq!(guest.write(0, 0, &[7; BLOCK]), OK);
        let more = More::new(2 * BLOCK);
        guest.driver.frontend().add_mem_region(&more.region()).unwrap();
        assert_eq!(more.read(&mut guest, 0), [7; BLOCK]);
        more.take_pages();
        assert_eq!(more.read(&mut guest, 0), [found; BLOCK], "what is in the pages of now");
    }
}

#[test]
fn memory_may_be_removed_and_other_memory_added_in_its_place() {
    if !has_rings() {
        return;
    }
    let length = 3 * BLOCK;
    let served = Served::registered(2, 2);
    // Of a size that no other test has.
    let options = Options { queues: 2, memory: (4 << 20) + 3 * BLOCK, ..Options::default() };
    let mut guest = served.connect(options);
    assert_slots(guest.driver.memory.len(), 2);
    for round in 1..30u8 {
        let more = More::new(length);
        guest.driver.frontend().add_mem_region(&more.region()).unwrap();
        assert_eq!(slots_of(length), 2, "once in each ring");
        for queue in 0..2 {
            let mark = 2 * round + queue as u8;
            more.write(&mut guest, queue, mark);
            assert_eq!(more.read(&mut guest, 1 - queue), [mark; BLOCK]);
            assert_eq!(guest.read(queue, 0, BLOCK).unwrap(), [mark; BLOCK]);
        }
        guest.driver.frontend().remove_mem_region(&more.region()).unwrap();
        let data = DescriptorSpec { address: MORE, length: BLOCK as u32, flags: WRITE };
        assert_eq!(guest.request(0, IN, 0, &[data]), FAILED, "it is gone");
        assert_slots(length, 0);
    }
    assert_slots(guest.driver.memory.len(), 2);
}

#[test]
fn a_table_of_memory_that_is_replaced_is_registered_anew() {
    if !has_rings() {
        return;
    }
    let length = 5 * BLOCK;
    let served = Served::registered(2, 1);
    // Of a size that no other test has.
    let options = Options { queues: 2, memory: (4 << 20) + 5 * BLOCK, ..Options::default() };
    let mut guest = served.connect(options);
    let first = guest.driver.region();
    for mark in 1..10 {
        let more = More::new(length);
        guest.driver.frontend().set_mem_table(&[first, more.region()]).unwrap();
        // Two queues share the ring.
        assert_slots(length, 1);
        assert_slots(guest.driver.memory.len(), 1);
        more.write(&mut guest, 1, mark);
        assert_eq!(more.read(&mut guest, 0), [mark; BLOCK]);
        assert_eq!(guest.read(0, 0, BLOCK).unwrap(), [mark; BLOCK]);
    }
}

#[test]
fn front_ends_come_and_go_with_their_memory() {
    if !has_rings() {
        return;
    }
    let served = Served::registered(4, 2);
    // Of a size that no other test has.
    let options = Options { queues: 4, memory: (4 << 20) + 7 * BLOCK, ..Options::default() };
    for round in 0..10u8 {
        let mut guest = served.connect(options);
        let length = guest.driver.memory.len();
        assert_slots(length, 2);
        for queue in 0..4 {
            if (round, queue) != (0, 0) {
                let mark = if queue == 0 { round - 1 + 3 } else { round + queue as u8 - 1 };
                assert_eq!(guest.read(queue, 0, BLOCK).unwrap(), [mark; BLOCK]);
            }
            assert_eq!(guest.write(queue, 0, &[round + queue as u8; BLOCK]), OK);
        }
        guest.driver.frontend().get_vring_base(3).unwrap();
        guest.driver.start_queue(3).unwrap();
        assert_eq!(guest.read(3, 0, BLOCK).unwrap(), [round + 3; BLOCK]);
        guest.driver.reconnect(&served.socket).unwrap();
        assert_eq!(guest.read(1, 0, BLOCK).unwrap(), [round + 3; BLOCK]);
        drop(guest);
        assert_slots(length, 0);
    }
}
