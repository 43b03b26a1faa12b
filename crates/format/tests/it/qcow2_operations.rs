//! The operations that reach the storage, counted; and an image whose storage has no room.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use blockhouse_core::{
    Buffer, ByteRange, Durability, ErrorKind, ExtentFlags, ExtentState, Storage, SyncMode, Unmap,
    errno,
};
use blockhouse_format::Intent;
use blockhouse_format::qcow2::{CreateOptions, OpenOptions, Preallocation, Qcow2, check, create};
use blockhouse_sim::{Config, Fault, Latency, Operation, OperationKind, Sim, SimDisk};

use crate::common::{read, unmap, write};

const CLUSTER: u64 = 65_536;

/// A new image of 64 MiB on a disk whose operations end in order.
fn new_image(sim: &Sim) -> (SimDisk, Rc<Qcow2<SimDisk>>) {
    let config = Config { latency: Latency::fixed(10, 50), ..Config::default() };
    let disk = SimDisk::new(sim, config, Vec::new());
    let made = disk.clone();
    let image = sim.block_on(async move {
        create(&made, &CreateOptions::new(64 << 20)).await.unwrap();
        Qcow2::open(made, OpenOptions::default()).await.unwrap()
    });
    (disk, Rc::new(image))
}

/// Writes a cluster as a durable request that stands alone would.
async fn write_durably(image: &Qcow2<SimDisk>, cluster: u64) {
    let range = ByteRange::between(cluster * CLUSTER, (cluster + 1) * CLUSTER);
    let extent = image.map(range, Intent::Write).await.unwrap();
    let ExtentState::Mapped { host } = extent.state else { panic!("{extent:?}") };
    let mut buffer = Buffer::new(CLUSTER as usize);
    image.storage().write(host, buffer.lend(), Durability::Data).await.unwrap();
    image.link(extent, Durability::Data).await.unwrap();
    image.sync_metadata().await.unwrap();
}

/// The flushes and discards that emptying an image of 8 MiB takes, each of whose clusters has a
/// place.
fn operations_to_empty(cluster_size: u64) -> [usize; 2] {
    let sim = Sim::new(1);
    let disk = SimDisk::new(&sim, Config::default(), Vec::new());
    let made = disk.clone();
    sim.block_on(async move {
        let preallocation = Preallocation::Metadata;
        let options = CreateOptions { cluster_size, preallocation, ..CreateOptions::new(8 << 20) };
        create(&made, &options).await.unwrap();
        let image = Qcow2::open(made.clone(), OpenOptions::default()).await.unwrap();
        made.take_log();
        image.make_empty().await.unwrap();
    });
    let log = kinds(&disk.take_log());
    [OperationKind::Flush, OperationKind::Discard]
        .map(|kind| log.iter().filter(|&&one| one == kind).count())
}

#[test]
fn emptying_an_image_of_small_clusters_takes_no_more_flushes() {
    let [flushes, discards] = operations_to_empty(512);
    let [few_flushes, few_discards] = operations_to_empty(CLUSTER);
    // Some more, because there are more refcount blocks; but not some for each few tables.
    assert!(flushes <= few_flushes + 1, "{flushes} flushes, {few_flushes} of large clusters");
    assert!(discards <= few_discards + 2, "{discards} discards, {few_discards} of large clusters");
}

fn kinds(log: &[Operation]) -> Vec<OperationKind> {
    log.iter().map(Operation::kind).collect()
}

#[test]
fn a_lone_durable_write_that_allocates_is_three_durable_writes() {
    let sim = Sim::new(1);
    let (disk, image) = new_image(&sim);
    sim.block_on(async move {
        write_durably(&image, 0).await;
        disk.take_log();
        write_durably(&image, 5).await;
        // Data, refcount, L2 entry.
        assert_eq!(kinds(&disk.take_log()), [OperationKind::DurableWrite; 3]);
        write_durably(&image, 5).await;
        assert_eq!(kinds(&disk.take_log()), [OperationKind::DurableWrite], "it is mapped now");
    });
}

#[test]
fn the_first_allocation_in_a_file_without_a_free_cluster_reads_few_refcounts() {
    let sim = Sim::new(1);
    let disk = SimDisk::new(&sim, Config::default(), Vec::new());
    sim.block_on(async move {
        // A refcount block counts 64 clusters.
        let options =
            CreateOptions { refcount_bits: 64, cluster_size: 512, ..CreateOptions::new(2 << 20) };
        create(&disk, &options).await.unwrap();
        let image = Qcow2::open(disk.clone(), OpenOptions::default()).await.unwrap();
        write(&image, 0, &[1; 1 << 20], 0).await.unwrap();
        image.close().await.unwrap();
        let image = Qcow2::open(disk.clone(), OpenOptions::default()).await.unwrap();
        let reads = async |at| {
            disk.take_log();
            write(&image, at, &[2; 512], 0).await.unwrap();
            kinds(&disk.take_log()).into_iter().filter(|&kind| kind == OperationKind::Read).count()
        };
        let first = reads(1 << 20).await;
        assert!(first <= 12, "{first} reads");
        let mut all = first;
        for number in 1..100 {
            all += reads((1 << 20) + number * 512).await;
        }
        assert!(all > 32, "the rest of the file is searched for free clusters: {all} reads");
    });
}

#[test]
fn an_overwrite_is_pure_as_soon_as_its_own_mapping_is_durable() {
    let sim = Sim::new(1);
    let (_, image) = new_image(&sim);
    sim.block_on(async move {
        write(&image, 0, &[1; 4096], 0).await.unwrap();
        let flags = || async {
            let extent = image.map(ByteRange::between(0, 4096), Intent::Write).await.unwrap();
            image.link(extent, Durability::None).await.unwrap();
            extent.flags
        };
        assert_eq!(flags().await, ExtentFlags::DIRTY);
        image.flush(SyncMode::Data).await.unwrap();
        assert_eq!(flags().await, ExtentFlags::empty());
        write(&image, CLUSTER, &[1; 4096], 0).await.unwrap();
        assert_eq!(flags().await, ExtentFlags::empty(), "a neighbour makes no difference");
    });
}

#[test]
fn writes_that_are_first_together_set_the_session_bit_once() {
    let sim = Sim::new(1);
    let (disk, image) = new_image(&sim);
    let log: Vec<_> = (0..1024).map(|_| AtomicU64::new(0)).collect();
    image.redo().attach(Arc::new(log));
    disk.take_log();
    for cluster in 0..8 {
        let image = Rc::clone(&image);
        sim.spawn(async move {
            write(&image, cluster * CLUSTER, &[1; 4096], 0).await.unwrap();
        });
    }
    sim.run();
    let headers = disk
        .take_log()
        .into_iter()
        .filter(|operation| matches!(operation, Operation::Write(range, _) if range.offset() == 0));
    assert_eq!(headers.count(), 1);
}

#[test]
fn a_hundred_allocating_writes_share_tables_and_flushes() {
    let sim = Sim::new(1);
    let (disk, image) = new_image(&sim);
    disk.take_log();
    let tasks: Vec<_> = (0..100)
        .map(|cluster| {
            let image = Rc::clone(&image);
            sim.spawn(async move {
                write(&image, cluster * CLUSTER, &[1; 4096], 0).await.unwrap();
                image.sync_metadata().await.unwrap();
            })
        })
        .collect();
    sim.run();
    assert!(tasks.iter().all(|task| task.output().is_some()));
    let log = disk.take_log();
    let flushes = log.iter().filter(|one| one.kind() == OperationKind::Flush).count();
    let writes = log.iter().filter(|one| one.kind() == OperationKind::Write).count();
    assert!(flushes <= 6, "{flushes} flushes");
    assert!(writes <= 100 + 12, "{writes} writes for 100 clusters");
}

#[test]
fn mapped_reads_and_overwrites_ask_nothing_of_the_storage() {
    let sim = Sim::new(1);
    let (disk, image) = new_image(&sim);
    sim.block_on(async move {
        write(&image, 0, &[1; 3 * CLUSTER as usize], 0).await.unwrap();
        disk.take_log();
        let range = ByteRange::between(512, 3 * CLUSTER);
        for intent in [Intent::Read, Intent::Write] {
            let extent = image.map(range, intent).await.unwrap();
            assert_eq!(extent.guest, range, "one extent for one run of clusters");
            image.link(extent, Durability::None).await.unwrap();
        }
        assert_eq!(disk.take_log(), []);
    });
}

#[test]
fn an_image_without_room_stays_whole_and_works_again() {
    // For each cluster its data and its refcount, and then the entry, which carries FUA.
    let plain = (0..10).map(|nth| (OperationKind::Write, nth));
    let durable = (0..5).map(|nth| (OperationKind::DurableWrite, nth));
    for (kind, nth) in plain.chain(durable) {
        let sim = Sim::new(nth);
        let (disk, image) = new_image(&sim);
        sim.block_on(async move {
            write(&image, 0, &[1; 4096], 0).await.unwrap();
            image.flush(SyncMode::Data).await.unwrap();
            disk.fail(Fault::nth(nth, errno::ENOSPC).of(kind));
            let mut refused = 0;
            for cluster in 1..6 {
                let outcome = write(&image, cluster * 512 * 1024, &[2; 4096], 0).await;
                let outcome = match outcome {
                    Ok(()) => image.flush(SyncMode::Data).await,
                    refused => refused,
                };
                if let Err(error) = outcome {
                    assert_eq!(error.kind(), ErrorKind::NoSpace, "{error:?}");
                    refused += 1;
                }
            }
            assert_eq!(refused, 1, "{kind:?} {nth}");
            let again = ByteRange::between(0, 3 << 20);
            unmap(&image, again, Intent::Zero(Unmap::Allowed), 0).await.unwrap();
            write(&image, 0, &[3; 4096], 0).await.unwrap();
            image.close().await.unwrap();
            let report = check(&image).await.unwrap();
            assert_eq!((report.corruptions, report.leaks), (0, 0), "{:?}", report.problems);
            let found = read(&image, ByteRange::between(0, 8192), 0).await.unwrap();
            assert!(found[..4096] == [3; 4096] && found[4096..] == [0; 4096]);
        });
    }
}
