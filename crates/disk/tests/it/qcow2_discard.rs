//! When the space of discarded clusters goes back to the host, when others may have it, and where
//! the file ends after it was closed.

use std::rc::Rc;

use blockhouse_core::{
    Buffer, Durability, ErrorKind, ReadAfterDiscard, Request, Storage, Unmap, errno,
};
use blockhouse_disk::{Access, BlockStatusCache, Disk, Image, ImageFormat, MapEntryKind, Options};
use blockhouse_format::qcow2::{self, Backing, CheckReport, CreateOptions, Qcow2, Version};
use blockhouse_sim::{Config, Fault, Latency, Operation, OperationKind, Sim, SimDisk, Size};

use crate::common::{Rig, discard, span, steady, write, zeroes};

const CLUSTER: u64 = 65_536;
const PLAIN: Durability = Durability::None;

/// A new image in which the first clusters have data, durably.
fn rig(read_after_discard: ReadAfterDiscard) -> Rig {
    let config = Config { read_after_discard, ..steady() };
    let rig = Rig::qcow2(config, CreateOptions::new(64 * CLUSTER));
    rig.submit(write(0, 4 * CLUSTER as usize, 1, PLAIN)).unwrap();
    rig.submit(Request::Flush).unwrap();
    rig.log();
    rig
}

fn discards(log: &[Operation]) -> usize {
    log.iter().filter(|one| matches!(one, Operation::Discard(_))).count()
}

/// Where the file has the cluster `index` of the guest.
fn place_of(rig: &Rig, index: u64) -> u64 {
    let disk = Rc::clone(&rig.disk);
    let placed = rig.sim.block_on(async move {
        let range = span(index * CLUSTER, CLUSTER);
        disk.map_entry(range, &mut BlockStatusCache::default()).await
    });
    match placed.unwrap().kind {
        MapEntryKind::Data { host } => host,
        other => panic!("{other:?}"),
    }
}

fn places(log: &[Operation]) -> Vec<u64> {
    let of_data = |one: &Operation| match one {
        Operation::Write(range, _) if range.length() == CLUSTER => Some(range.offset()),
        _ => None,
    };
    log.iter().filter_map(of_data).collect()
}

#[test]
fn space_goes_back_at_once_where_it_reads_as_zeros_then() {
    for request in [discard(CLUSTER, 2 * CLUSTER), zeroes(CLUSTER, 2 * CLUSTER, PLAIN)] {
        let rig = rig(ReadAfterDiscard::Zeros);
        rig.submit(request).unwrap();
        let log = rig.log();
        assert!(matches!(log[..], [Operation::Discard(range)] if range.length() == 2 * CLUSTER));
        rig.submit(Request::Flush).unwrap();
        assert_eq!(discards(&rig.log()), 0, "not once more");
    }
}

#[test]
fn space_goes_back_with_the_next_flush_where_anything_may_come_to_light_in_it() {
    let rig = rig(ReadAfterDiscard::Undefined);
    rig.submit(discard(CLUSTER, 2 * CLUSTER)).unwrap();
    assert_eq!(rig.log(), []);
    rig.submit(Request::Flush).unwrap();
    let log = rig.log();
    let tables = log.iter().rposition(|one| matches!(one, Operation::Write(..)));
    let place = log.iter().position(|one| matches!(one, Operation::Discard(_)));
    assert!(tables.is_some() && tables < place, "the tables first: {log:?}");
}

#[test]
fn nobody_gets_a_cluster_that_tables_on_disk_may_still_refer_to() {
    for read_after_discard in [ReadAfterDiscard::Zeros, ReadAfterDiscard::Undefined] {
        let rig = rig(read_after_discard);
        let old = place_of(&rig, 1);
        rig.submit(discard(CLUSTER, CLUSTER)).unwrap();
        rig.log();
        rig.submit(write(8 * CLUSTER, CLUSTER as usize, 2, PLAIN)).unwrap();
        assert!(!places(&rig.log()).contains(&old), "before a flush");
        rig.submit(Request::Flush).unwrap();
        rig.log();
        rig.submit(write(9 * CLUSTER, CLUSTER as usize, 3, PLAIN)).unwrap();
        assert_eq!(places(&rig.log()), [old], "after it");
    }
}

const MIB: u64 = 1 << 20;

/// Closes the image; what a check finds then.
fn close(rig: &Rig) -> CheckReport {
    let (disk, storage) = (Rc::clone(&rig.disk), rig.storage.clone());
    rig.sim.block_on(async move {
        disk.close().await.expect("an orderly end");
        let image = Qcow2::open(storage, qcow2::OpenOptions::default()).await.expect("an image");
        let report = qcow2::check(&image).await.expect("a check");
        assert_eq!((report.corruptions, report.leaks), (0, 0), "{:?}", report.problems);
        report
    })
}

/// Requests for all of a disk, in pieces.
fn in_pieces(size: u64, piece: u64, request: impl Fn(u64) -> Request) -> Vec<Request> {
    (0..size / piece).map(|index| request(index * piece)).collect()
}

#[test]
fn what_is_trimmed_and_written_again_and_again_does_not_make_the_file_longer() {
    const SIZE: u64 = 8 * MIB;
    let rig = Rig::qcow2(
        Config { read_after_discard: ReadAfterDiscard::Zeros, ..steady() },
        CreateOptions::new(SIZE),
    );
    for round in 1..=4 {
        for request in in_pieces(SIZE, MIB, |offset| write(offset, MIB as usize, round, PLAIN)) {
            rig.submit(request).unwrap();
        }
        for request in in_pieces(SIZE, 4 * CLUSTER, |offset| discard(offset, 4 * CLUSTER)) {
            rig.submit(request).unwrap();
        }
    }
    // At most 4 MiB wait; tables and what the file is made longer ahead come on top.
    let length = rig.storage.size();
    assert!(length <= SIZE + 10 * MIB, "{length} bytes for a disk of {SIZE}");
    close(&rig);
    assert!(rig.storage.size() < MIB, "nothing is in it any more: {}", rig.storage.size());
}

/// A disk over a new image at the beginning of a device of this many bytes, with anything behind
/// it.
fn on_device(image: CreateOptions, length: u64) -> Rig {
    on_device_like(steady(), image, length)
}

fn on_device_like(config: Config, image: CreateOptions, length: u64) -> Rig {
    let sim = Sim::new(1);
    let file = SimDisk::new(&sim, steady(), Vec::new());
    let made = file.clone();
    sim.block_on(async move { qcow2::create(&made, &image).await }).expect("a new image");
    let mut content = file.content();
    content.resize(length as usize, 0xee);
    let storage = SimDisk::new(&sim, Config { size: Size::Fixed, ..config }, content);
    let opened = storage.clone();
    let disk = sim
        .block_on(async move { Disk::open(opened, ImageFormat::Qcow2, Options::default()).await });
    Rig { sim, storage, disk: Rc::new(disk.expect("the new image")) }
}

#[test]
fn a_full_device_gives_what_was_trimmed_before_it_says_that_it_is_full() {
    const SIZE: u64 = 4 * MIB;
    let rig = on_device(CreateOptions::new(SIZE), 5 * MIB);
    for round in 1..=3 {
        for request in in_pieces(SIZE, MIB, |offset| write(offset, MIB as usize, round, PLAIN)) {
            rig.submit(request).unwrap_or_else(|error| panic!("round {round}: {error}"));
        }
        assert_eq!(rig.read(0, MIB as usize), vec![round; MIB as usize]);
        // Less than is worth a writeback by itself.
        rig.submit(discard(0, 3 * MIB)).unwrap();
    }
    close(&rig);
}

#[test]
fn a_device_is_used_to_its_end_whatever_its_refcount_blocks_reach() {
    // A refcount block is for 128 KiB.
    let options = CreateOptions { cluster_size: 512, ..CreateOptions::new(512 << 10) };
    let rig = on_device(options, 640 << 10);
    let all = rig.submit(write(0, 512 << 10, 7, PLAIN));
    all.expect("room for all of it");
    // New clusters of a device do not read as zeros by themselves.
    rig.submit(discard(0, 64 << 10)).unwrap();
    rig.submit(Request::Flush).unwrap();
    rig.submit(write(100, 10, 9, PLAIN)).unwrap();
    let mut expected = vec![0; 512];
    expected[100..110].fill(9);
    assert_eq!(rig.read(0, 512), expected);
    close(&rig);
}

/// Fills a disk cluster by cluster until its storage is full; how many clusters have data then.
fn fill(rig: &Rig, cluster: u64, clusters: u64) -> u64 {
    for index in 0..clusters {
        if let Err(error) = rig.submit(write(index * cluster, cluster as usize, 1, PLAIN)) {
            assert_eq!(error.kind(), ErrorKind::NoSpace);
            return index;
        }
    }
    panic!("the storage is never full");
}

#[test]
fn a_device_that_ends_with_what_a_refcount_block_is_for_gives_what_was_trimmed() {
    const SMALL: u64 = 512;
    // A refcount block is for 128 KiB.
    let options = CreateOptions { cluster_size: SMALL, ..CreateOptions::new(512 << 10) };
    let rig = on_device(options, 256 << 10);
    let full = fill(&rig, SMALL, 1024);
    rig.submit(discard(0, 16 * SMALL)).unwrap();
    for index in 0..8 {
        let outcome = rig.submit(write((full + index) * SMALL, SMALL as usize, 2, PLAIN));
        outcome.unwrap_or_else(|error| panic!("write {index}: {error}"));
    }
    close(&rig);
}

#[test]
fn a_device_that_was_full_before_gives_what_was_trimmed() {
    let rig = on_device(CreateOptions::new(4 * MIB), 2 * MIB);
    let full = fill(&rig, CLUSTER, 64);
    rig.submit(discard(0, 4 * CLUSTER)).unwrap();
    for index in 0..4 {
        let outcome = rig.submit(write((full + index) * CLUSTER, CLUSTER as usize, 2, PLAIN));
        outcome.unwrap_or_else(|error| panic!("write {index}: {error}"));
    }
    let more = rig.submit(write((full + 4) * CLUSTER, CLUSTER as usize, 2, PLAIN));
    assert_eq!(more.unwrap_err().kind(), ErrorKind::NoSpace);
    close(&rig);
}

#[test]
fn writes_wait_for_clusters_that_are_being_freed_on_a_full_device() {
    // Clusters are punched only when no table on disk refers to them.
    let config = Config { read_after_discard: ReadAfterDiscard::Undefined, ..steady() };
    let rig = on_device_like(config, CreateOptions::new(2 * MIB), MIB);
    let full = fill(&rig, CLUSTER, 32);
    rig.submit(discard(0, 4 * CLUSTER)).unwrap();
    rig.log();
    let flush = rig.start(Request::Flush);
    while discards(&rig.log()) == 0 {
        assert!(rig.sim.step(), "the flush punches");
    }
    let begin = |index| rig.start(write((full + index) * CLUSTER, CLUSTER as usize, 2, PLAIN));
    let writes: Vec<_> = (0..4).map(begin).collect();
    rig.sim.run();
    flush.output().expect("an end").unwrap();
    for one in writes {
        one.output().expect("an end").unwrap();
    }
    close(&rig);
}

#[test]
fn a_gap_in_the_refcount_table_is_passed_in_one_step() {
    const SMALL: u64 = 512;
    // Clusters of a refcount block, and the index of the block behind the gap.
    const COUNTS: u64 = 256;
    const BEHIND: u64 = 12;
    let sim = Sim::new(1);
    let file = SimDisk::new(&sim, steady(), Vec::new());
    let made = file.clone();
    let options = CreateOptions { cluster_size: SMALL, ..CreateOptions::new(512 << 10) };
    sim.block_on(async move { qcow2::create(&made, &options).await }).expect("a new image");
    let mut content = file.content();
    let length = (BEHIND + 1) * COUNTS * SMALL;
    content.resize(length as usize, 0);
    let word = |content: &[u8], at: usize| {
        u64::from_be_bytes(content[at..at + 8].try_into().expect("8 bytes")) as usize
    };
    let table = word(&content, 48);
    let first = word(&content, table);
    // All is taken before the gap; behind it only the block itself.
    for count in content[first..first + SMALL as usize].chunks_exact_mut(2) {
        count.copy_from_slice(&[0, 1]);
    }
    let block = BEHIND * COUNTS * SMALL;
    content[block as usize + 1] = 1;
    let entry = table + BEHIND as usize * 8;
    content[entry..entry + 8].copy_from_slice(&block.to_be_bytes());
    let storage = SimDisk::new(&sim, steady(), content);
    let opened = storage.clone();
    let disk = sim
        .block_on(async move { Disk::open(opened, ImageFormat::Qcow2, Options::default()).await });
    let rig = Rig { sim, storage, disk: Rc::new(disk.expect("the new image")) };
    rig.submit(write(0, 16 * SMALL as usize, 1, PLAIN)).unwrap();
    rig.submit(Request::Flush).unwrap();
    assert_eq!(rig.storage.size(), length, "its free clusters come before new ones");
}

#[test]
fn a_file_ends_behind_its_last_cluster_after_the_host_was_full() {
    let rig = rig(ReadAfterDiscard::Zeros);
    rig.storage.fail(Fault::chance(1.0, errno::ENOSPC).of(OperationKind::Write));
    for index in 8..40 {
        let error = rig.submit(write(index * CLUSTER, CLUSTER as usize, 2, PLAIN)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSpace);
    }
    rig.storage.clear_faults();
    let report = close(&rig);
    assert_eq!(rig.storage.size(), report.end);
    assert!(report.end < 10 * CLUSTER, "failed writes keep no space: {}", report.end);
}

#[test]
fn a_file_is_cut_behind_what_a_shorter_disk_has_left() {
    let options = CreateOptions { cluster_size: 512, ..CreateOptions::new(2 * MIB) };
    for read_after_discard in [ReadAfterDiscard::Zeros, ReadAfterDiscard::Undefined] {
        let rig = Rig::qcow2(Config { read_after_discard, ..steady() }, options.clone());
        rig.submit(write(0, 2048, 1, PLAIN)).unwrap();
        rig.submit(write(MIB, MIB as usize, 2, PLAIN)).unwrap();
        let disk = Rc::clone(&rig.disk);
        rig.sim.block_on(async move { disk.shrink(MIB).await }).unwrap();
        let report = close(&rig);
        // More than its refcount blocks are for is gone, and they with it.
        assert_eq!(rig.storage.size(), report.end);
        assert!(report.end < 64 << 10, "{read_after_discard:?}: {} bytes for 2048", report.end);
    }
}

#[test]
fn a_file_that_nothing_was_taken_from_keeps_its_length() {
    let image = CreateOptions::new(64 * CLUSTER);
    let rig = Rig::qcow2_with_room(steady(), image, 16 * CLUSTER);
    let length = rig.storage.size();
    close(&rig);
    assert_eq!(rig.storage.size(), length);
}

#[test]
fn a_snapshot_beside_clusters_that_are_being_freed_leaks_none() {
    for read_after_discard in [ReadAfterDiscard::Undefined, ReadAfterDiscard::Zeros] {
        // Freeing takes long, flushes do not.
        let config =
            Config { read_after_discard, latency: Latency::fixed(100, 1), ..Config::default() };
        let rig = Rig::qcow2(config, CreateOptions::new(64 * CLUSTER));
        rig.submit(write(0, 40 * CLUSTER as usize, 1, PLAIN)).unwrap();
        rig.submit(Request::Flush).unwrap();
        for index in 0..20 {
            rig.submit(discard(2 * index * CLUSTER, CLUSTER)).unwrap();
        }
        let flush = rig.start(Request::Flush);
        let disk = Rc::clone(&rig.disk);
        let sim = rig.sim.clone();
        let snapshot = rig.sim.spawn(async move {
            sim.sleep(std::time::Duration::from_micros(450)).await;
            disk.snapshots().create("one").await.map(|_| ()).map_err(|error| error.to_string())
        });
        rig.sim.run();
        flush.output().expect("an end").unwrap();
        snapshot.output().expect("an end").unwrap();
        close(&rig);
    }
}

/// A disk of version 2 over a file of `behind` clusters of 0xbb.
fn old_over(behind: u64, read_after_discard: ReadAfterDiscard) -> Rig {
    let backing = Backing { name: b"base".to_vec(), format: Some("raw".into()) };
    let options = CreateOptions {
        version: Version::V2,
        backing: Some(backing),
        ..CreateOptions::new(16 * CLUSTER)
    };
    let Rig { sim, storage, disk } = Rig::qcow2(Config { read_after_discard, ..steady() }, options);
    drop(disk);
    let base = SimDisk::new(&sim, Config::default(), vec![0xbb; (behind * CLUSTER) as usize]);
    let opened = storage.clone();
    let disk = sim.block_on(async move {
        let reading = Options { access: Access::ReadOnly, ..Options::default() };
        let base = Image::raw(base, reading).expect("whole sectors");
        let image = Image::open(opened, ImageFormat::Qcow2, Options::default()).await;
        Disk::new(image.expect("an image").with_backing(&base))
    });
    Rig { sim, storage, disk: Rc::new(disk) }
}

#[test]
fn an_old_image_keeps_what_is_discarded_over_its_backing_file() {
    let cluster = CLUSTER as usize;
    for read_after_discard in [ReadAfterDiscard::Zeros, ReadAfterDiscard::Undefined] {
        let rig = old_over(8, read_after_discard);
        rig.submit(write(0, 12 * cluster, 1, PLAIN)).unwrap();
        for request in [discard(100, 1000), discard(CLUSTER, 11 * CLUSTER), discard(0, CLUSTER / 2)]
        {
            rig.submit(request).unwrap();
            rig.submit(Request::Flush).unwrap();
        }
        assert_eq!(rig.read(0, 8 * cluster), vec![1; 8 * cluster], "{read_after_discard:?}");
        // No byte of the backing file lies behind the rest: it is free.
        assert_eq!(rig.read(8 * CLUSTER, 4 * cluster), vec![0; 4 * cluster]);
        assert_eq!(close(&rig).allocated_clusters, 8);
    }
}

#[test]
fn zeros_over_a_backing_file_stay_zeros_whatever_follows() {
    let cluster = CLUSTER as usize;
    for unmap in [Unmap::Allowed, Unmap::Forbidden] {
        let rig = old_over(8, ReadAfterDiscard::Zeros);
        let (range, durability) = (span(0, 16 * CLUSTER), PLAIN);
        let fallback = blockhouse_core::Fallback::Allowed;
        rig.submit(Request::WriteZeroes { range, unmap, fallback, durability }).unwrap();
        rig.submit(discard(0, 16 * CLUSTER)).unwrap();
        assert_eq!(rig.read(0, 16 * cluster), vec![0; 16 * cluster]);
        let disk = Rc::clone(&rig.disk);
        rig.sim.block_on(async move {
            disk.shrink(3 * CLUSTER + 512).await.unwrap();
            disk.resize(16 * CLUSTER).await.unwrap();
            disk.submit(discard(0, 16 * CLUSTER)).await.unwrap();
            let mut buffer = Buffer::new(16 * cluster);
            disk.submit(Request::Read { offset: 0, into: buffer.lend() }).await.unwrap();
            assert!(buffer.bytes().iter().all(|&byte| byte == 0));
        });
        close(&rig);
    }
}
