//! A guest's memory in a ring's own table: that requests go by its pages there, and that slots come
//! and go with the memory. Skipped where there is no io_uring, or one without such tables.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{Durability, IoVector, Storage, SyncMode};
use blockhouse_engine::{
    Engine, EngineChoice, EventLoop, FaultDomain, GuestMemory, GuestRange, GuestRegion, HostFile,
    OpenMode, PageCache, SharedMemory, count_registered_buffers, sleep,
};
use rustix::fs::{FallocateFlags, MemfdFlags};
use tempfile::TempDir;

use crate::common::on_every_engine;

const BLOCK: usize = 4096;
/// Where regions begin for the guest.
const GUEST: u64 = 1 << 32;

fn new_loop() -> Option<EventLoop> {
    match EventLoop::new(EngineChoice::Only(Engine::IoUring)) {
        Ok(event_loop) => Some(event_loop),
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

/// Not on tmpfs, whose files are served without the ring.
fn folder() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// A file of a few blocks, full of `mark`.
fn marked(path: &Path, mark: u8) -> HostFile {
    std::fs::write(path, [mark; 4 * BLOCK]).unwrap();
    HostFile::open(path, OpenMode::ReadWrite, PageCache::Used).unwrap()
}

/// Memory of `blocks` blocks at [`GUEST`], and the file that it is in.
fn guest(blocks: usize) -> (GuestMemory, OwnedFd) {
    let file = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, (blocks * BLOCK) as u64).unwrap();
    let shared = SharedMemory::map(&file, 0, blocks * BLOCK, &FaultDomain::unconnected()).unwrap();
    let mut memory = GuestMemory::new();
    assert!(memory.add(GuestRegion { guest: GUEST, user_addr: 0, memory: Arc::new(shared) }));
    (memory, file)
}

/// The first block of a guest's memory.
fn block(memory: &GuestMemory) -> IoVector {
    let range = GuestRange { address: GUEST, length: BLOCK as u32 };
    Arc::new(memory.clone()).vector(&[range]).unwrap()
}

/// The byte of which a guest's first block is full.
fn mark(memory: &GuestMemory) -> u8 {
    let mut bytes = [0; BLOCK];
    assert!(memory.read(GUEST, &mut bytes));
    assert!(bytes.iter().all(|&byte| byte == bytes[0]), "a block in part");
    bytes[0]
}

/// Gives the pages back to the host, as a balloon does.
fn take_pages(file: &OwnedFd) {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, flags, 0, BLOCK as u64).unwrap();
}

/// How many slots of this process's rings have `length` bytes.
fn slots_of(length: usize) -> usize {
    count_registered_buffers(Path::new("/proc/self"), length).unwrap()
}

/// Lets the loop hear of what is no longer used.
async fn turn() {
    sleep(Duration::from_millis(1)).await;
}

/// The marks that the guest finds read, and the file written, when the pages were taken away
/// meanwhile.
fn marks_without_pages(register: impl FnOnce(&GuestMemory)) -> Option<(u8, u8)> {
    let mut event_loop = new_loop()?;
    let folder = folder();
    let path = folder.path().join("disk");
    let file = marked(&path, 7);
    let (memory, pages) = guest(1);
    assert!(memory.write(GUEST, &[3; BLOCK]));
    event_loop.block_on(async {
        register(&memory);
        take_pages(&pages);
        file.write(BLOCK as u64, block(&memory), Durability::Data).await.unwrap();
        file.read(0, block(&memory)).await.unwrap();
    });
    Some((mark(&memory), std::fs::read(path).unwrap()[BLOCK]))
}

#[test]
fn requests_go_by_the_pages_that_were_registered() {
    let marks = marks_without_pages(|memory| memory.register().unwrap());
    let Some(marks) = marks else { return };
    assert_eq!(marks, (0, 3), "data goes to and from the pages that were there");
}

#[test]
fn requests_go_by_address_where_nothing_was_registered() {
    let Some(marks) = marks_without_pages(|_| ()) else { return };
    assert_eq!(marks, (7, 0), "data goes to and from the pages that are there now");
}

/// Whether the kernel takes several segments of a slot, and takes the right ones: from 6.16 on.
fn takes_several_segments() -> bool {
    let mut probe = io_uring::Probe::new();
    let ring = io_uring::IoUring::new(2).unwrap();
    ring.submitter().register_probe(&mut probe).unwrap();
    let newest = io_uring::opcode::Pipe::CODE;
    probe.is_supported(io_uring::opcode::ReadvFixed::CODE) && probe.is_supported(newest)
}

/// The marks that the guest finds read, and the file written, when the pages were taken away that
/// both halves of a block were registered with.
fn marks_of_halves_without_pages() -> Option<(u8, u8)> {
    let mut event_loop = new_loop()?;
    let folder = folder();
    let path = folder.path().join("disk");
    let file = marked(&path, 7);
    let (memory, pages) = guest(1);
    assert!(memory.write(GUEST, &[3; BLOCK]));
    event_loop.block_on(async {
        memory.register().unwrap();
        take_pages(&pages);
        let half = |address| GuestRange { address, length: BLOCK as u32 / 2 };
        let halves = [half(GUEST + BLOCK as u64 / 2), half(GUEST)];
        let vector = || Arc::new(memory.clone()).vector(&halves).unwrap();
        file.write(BLOCK as u64, vector(), Durability::Data).await.unwrap();
        file.read(0, vector()).await.unwrap();
    });
    Some((mark(&memory), std::fs::read(path).unwrap()[BLOCK]))
}

#[test]
fn several_segments_go_by_the_pages_that_were_registered_where_the_kernel_can() {
    let Some(marks) = marks_of_halves_without_pages() else { return };
    let (registered, present) = ((0, 3), (7, 0));
    assert_eq!(marks, if takes_several_segments() { registered } else { present });
}

/// Memory of two regions that lie side by side for the guest, each of `length` bytes.
fn guest_of_two_regions(length: usize) -> GuestMemory {
    let (mut memory, domain) = (GuestMemory::new(), FaultDomain::unconnected());
    for user_addr in [0, length as u64] {
        let file = rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, length as u64).unwrap();
        let shared = Arc::new(SharedMemory::map(&file, 0, length, &domain).unwrap());
        let guest = GUEST + user_addr;
        assert!(memory.add(GuestRegion { guest, user_addr, memory: shared }));
    }
    memory
}

/// Segments in any order, of any length, some overlapping, in one region or in two: always the
/// bytes that they name, and no others.
#[test]
fn several_segments_name_their_own_bytes() {
    const LENGTH: usize = 24 * BLOCK;
    let folder = folder();
    let path = folder.path().join("disk");
    on_every_engine(|event_loop| {
        for seed in 0..16 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut on_disk: Vec<u8> = (0..4 * LENGTH).map(|_| random.u8(..)).collect();
            let mut in_memory: Vec<u8> = (0..2 * LENGTH).map(|_| random.u8(..)).collect();
            std::fs::write(&path, &on_disk).unwrap();
            let file = HostFile::open(&path, OpenMode::ReadWrite, PageCache::Used).unwrap();
            let memory = Arc::new(guest_of_two_regions(LENGTH));
            assert!(memory.write(GUEST, &in_memory));
            let bytes = if seed % 2 == 0 { LENGTH } else { 2 * LENGTH };
            let segments: Vec<(usize, usize)> = (0..random.usize(2..20))
                .map(|_| (random.usize(..bytes - 3000), random.usize(1..3000)))
                .collect();
            let range = |&(start, length): &(usize, usize)| GuestRange {
                address: GUEST + start as u64,
                length: length as u32,
            };
            let ranges: Vec<GuestRange> = segments.iter().map(range).collect();
            let (source, target) = (random.usize(..LENGTH), 2 * LENGTH);
            event_loop.block_on(async {
                memory.register().unwrap();
                file.read(source as u64, memory.vector(&ranges).unwrap()).await.unwrap();
                let vector = memory.vector(&ranges).unwrap();
                file.write(target as u64, vector, Durability::None).await.unwrap();
            });
            let mut at = source;
            for &(start, length) in &segments {
                in_memory[start..start + length].copy_from_slice(&on_disk[at..at + length]);
                at += length;
            }
            let mut at = target;
            for &(start, length) in &segments {
                on_disk[at..at + length].copy_from_slice(&in_memory[start..start + length]);
                at += length;
            }
            let mut found = vec![0; in_memory.len()];
            assert!(memory.read(GUEST, &mut found));
            assert!(found == in_memory, "other bytes in memory, seed {seed}");
            assert!(std::fs::read(&path).unwrap() == on_disk, "other bytes on disk, seed {seed}");
        }
    });
}

#[test]
fn slots_go_with_the_last_use_of_the_memory() {
    const BLOCKS: usize = 5;
    let Some(mut event_loop) = new_loop() else { return };
    let folder = folder();
    let path = folder.path().join("disk");
    let file = marked(&path, 7);
    event_loop.block_on(async {
        for mark in 1..20 {
            let (memory, _) = guest(BLOCKS);
            assert!(memory.write(GUEST, &[mark; BLOCK]));
            memory.register().unwrap();
            memory.register().unwrap();
            assert_eq!(slots_of(BLOCKS * BLOCK), 1, "registered once");
            let vector = block(&memory);
            drop(memory);
            turn().await;
            assert_eq!(slots_of(BLOCKS * BLOCK), 1, "a request to come needs it");
            file.write(0, vector, Durability::None).await.unwrap();
            assert_eq!(std::fs::read(&path).unwrap()[..BLOCK], [mark; BLOCK]);
            turn().await;
            assert_eq!(slots_of(BLOCKS * BLOCK), 0);
        }
    });
}

#[test]
fn addresses_are_not_used_anew_while_a_slot_names_them() {
    const BLOCKS: usize = 6;
    let Some(mut event_loop) = new_loop() else { return };
    let folder = folder();
    let file = marked(&folder.path().join("disk"), 7);
    let address = |memory: &GuestMemory| block(memory).segments()[0].address;
    let (first, _) = guest(BLOCKS);
    let first_address = address(&first);
    event_loop.block_on(async { first.register().unwrap() });
    // The loop does not run, so it cannot have heard of it.
    drop(first);
    assert_eq!(slots_of(BLOCKS * BLOCK), 1);
    let (second, _) = guest(BLOCKS);
    assert_ne!(address(&second), first_address);
    event_loop.block_on(async {
        file.read(0, block(&second)).await.unwrap();
        assert_eq!(mark(&second), 7);
        second.register().unwrap();
        turn().await;
        assert_eq!(slots_of(BLOCKS * BLOCK), 1);
        file.read(0, block(&second)).await.unwrap();
    });
    assert_eq!(mark(&second), 7);
}

#[test]
fn each_loop_has_slots_of_its_own_and_gives_them_back_at_its_end() {
    const BLOCKS: usize = 7;
    let Some(mut first) = new_loop() else { return };
    let mut second = new_loop().unwrap();
    let (memory, _) = guest(BLOCKS);
    first.block_on(async { memory.register().unwrap() });
    second.block_on(async { memory.register().unwrap() });
    assert_eq!(slots_of(BLOCKS * BLOCK), 2);
    drop(first);
    assert_eq!(slots_of(BLOCKS * BLOCK), 1);
    drop(memory);
    second.block_on(turn());
    assert_eq!(slots_of(BLOCKS * BLOCK), 0);
}

#[test]
fn registered_memory_works_on_every_engine() {
    let folder = folder();
    let path = folder.path().join("disk");
    on_every_engine(|event_loop| {
        let file = marked(&path, 7);
        let (memory, _) = guest(2);
        event_loop.block_on(async {
            memory.register().unwrap();
            file.read(0, block(&memory)).await.unwrap();
            assert_eq!(mark(&memory), 7);
            assert!(memory.write(GUEST, &[8; BLOCK]));
            file.write(0, block(&memory), Durability::Data).await.unwrap();
            file.flush(SyncMode::Full).await.unwrap();
        });
        assert_eq!(std::fs::read(&path).unwrap()[..BLOCK], [8; BLOCK]);
    });
}

#[test]
fn memory_that_cannot_be_pinned_is_used_all_the_same() {
    let Some(mut event_loop) = new_loop() else { return };
    let folder = folder();
    let file = marked(&folder.path().join("disk"), 7);
    // A page that is not there cannot be pinned, and so none of the region is.
    let (memory, pages) = guest(2);
    rustix::fs::ftruncate(&pages, BLOCK as u64).unwrap();
    event_loop.block_on(async {
        assert!(memory.register().is_err());
        file.read(0, block(&memory)).await.unwrap();
    });
    assert_eq!(mark(&memory), 7);
}
