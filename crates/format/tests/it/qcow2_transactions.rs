//! Changes of the whole image that fail or are dropped, beside other changes of the image.

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use blockhouse_core::{ByteRange, ErrorKind, Result, SyncMode, errno};
use blockhouse_format::Intent;
use blockhouse_format::qcow2::{CreateOptions, NewBitmap, NewSnapshot, OpenOptions, Qcow2, create};
use blockhouse_sim::{Config, Fault, Operation, OperationKind, Sim, SimDisk};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::common::{read, unmap, write};

const CLUSTER: u64 = 4096;
const SIZE: u64 = 64 * CLUSTER;
/// Where the header has the corrupt bit.
const IS_CORRUPT: (usize, u8) = (79, 2);

async fn open(disk: &SimDisk) -> Qcow2<SimDisk> {
    Qcow2::open(disk.clone(), OpenOptions::default()).await.expect("a good image")
}

fn first(name: &str) -> NewSnapshot {
    NewSnapshot { name: name.into(), created: Duration::ZERO, vm_clock: Duration::ZERO }
}

async fn take(image: &Qcow2<SimDisk>, name: &str) -> Result<()> {
    image.snapshots().create(&first(name), None).await.map(drop)
}

/// An image with `clusters` clusters of data, after `change`.
fn image(clusters: u64, change: impl AsyncFnOnce(&Qcow2<SimDisk>) + 'static) -> Vec<u8> {
    let sim = Sim::new(0);
    let disk = SimDisk::new(&sim, Config::default(), Vec::new());
    let made = disk.clone();
    sim.block_on(async move {
        let options = CreateOptions { cluster_size: CLUSTER, ..CreateOptions::new(SIZE) };
        create(&made, &options).await.unwrap();
        let image = open(&made).await;
        write(&image, 0, &vec![1; (clusters * CLUSTER) as usize], 0).await.unwrap();
        change(&image).await;
        image.close().await.unwrap();
    });
    disk.content()
}

/// Either tables may be active on disk: a cluster of the old ones may belong to a snapshot.
#[test]
fn no_data_is_written_after_a_failed_switch_not_even_after_another_transaction() {
    let content = image(1, async |_| {});
    let mut switches = 0;
    for n in 0.. {
        let sim = Sim::new(1);
        let disk = SimDisk::new(&sim, Config::default(), content.clone());
        let is_ended = sim.block_on(async move {
            let image = open(&disk).await;
            disk.fail(Fault::nth(n, errno::EIO).of(OperationKind::Write));
            let outcome = take(&image, "first").await;
            if !disk.has_failed() {
                return None;
            }
            outcome.expect_err("a write failed");
            let is_refused = write(&image, 0, &[2; 512], 0).await.is_err();
            let _ = take(&image, "second").await;
            let is_refused_later = write(&image, 0, &[3; 512], 0).await.is_err();
            assert!(!is_refused || is_refused_later, "write {n}");
            Some(is_refused)
        });
        match is_ended {
            Some(is_switch) => switches += u32::from(is_switch),
            None => break,
        }
    }
    assert!(switches > 0);
}

/// The space that a transaction frees goes to the host, whenever the transaction is dropped.
#[test]
fn no_hole_is_punched_into_data_after_a_transaction_was_dropped() {
    let content = image(4, async |image| {
        take(image, "first").await.unwrap();
        write(image, 0, &[2; 4 * CLUSTER as usize], 0).await.unwrap();
    });
    for steps in 0.. {
        let sim = Sim::new(1);
        let disk = SimDisk::new(&sim, Config::default(), content.clone());
        let opened = disk.clone();
        let image = Rc::new(sim.block_on(async move { open(&opened).await }));
        disk.take_log();
        // A hole is punched after the writes.
        disk.fail(Fault::late(0, Duration::from_secs(1)).of(OperationKind::Discard));
        let deleted = Rc::clone(&image);
        let task = sim.spawn(async move { deleted.snapshots().delete("first").await });
        let is_ended = !(0..steps).all(|_| task.output().is_none() && sim.step());
        task.cancel();
        let is_punched = disk.take_log().iter().any(|one| one.kind() == OperationKind::Discard);
        let written = Rc::clone(&image);
        let write =
            sim.spawn(
                async move { write(&written, 8 * CLUSTER, &[3; 8 * CLUSTER as usize], 0).await },
            );
        sim.run();
        let outcome = write.output().expect("the write waits for ever");
        let found = sim.block_on(async move {
            read(&image, ByteRange::between(8 * CLUSTER, 16 * CLUSTER), 0).await
        });
        if outcome.is_ok() {
            assert!(found.unwrap() == [3; 8 * CLUSTER as usize], "{steps} steps");
        }
        if is_ended {
            assert!(is_punched);
            break;
        }
    }
}

/// A read stumbles over the damage at any step of a transaction.
#[test]
fn a_switch_does_not_clear_the_corrupt_bit() {
    let mut content = image(2, async |_| {});
    let word = |at: usize| u64::from_be_bytes(content[at..at + 8].try_into().unwrap());
    let table = (word(word(40) as usize) & ((1 << 56) - 512)) as usize;
    content[table + 8..table + 16].copy_from_slice(&(1_u64 << 63 | 1 << 40).to_be_bytes());
    for seed in 0..20 {
        for steps in 0.. {
            let sim = Sim::new(seed);
            let disk = SimDisk::new(&sim, Config::default(), content.clone());
            let opened = disk.clone();
            let image = Rc::new(sim.block_on(async move { open(&opened).await }));
            let changed = Rc::clone(&image);
            let task = sim.spawn(async move {
                let new = NewBitmap { name: "new".into(), granularity: None, is_enabled: false };
                changed.bitmaps().add(&new).await
            });
            let is_ended = !(0..steps).all(|_| task.output().is_none() && sim.step());
            let stumbled = sim.spawn(async move {
                image.map(ByteRange::between(CLUSTER, 2 * CLUSTER), Intent::Read).await
            });
            sim.run();
            let error = stumbled.output().expect("it never ends").expect_err("a bad entry");
            assert_eq!(error.kind(), ErrorKind::Corrupt);
            let is_marked = disk.content()[IS_CORRUPT.0] & IS_CORRUPT.1 != 0;
            assert!(is_marked, "seed {seed}, {steps} steps");
            if is_ended {
                break;
            }
        }
    }
}

/// The clusters of an earlier discard cannot be freed.
#[test]
fn a_flush_does_not_fail_for_clusters_that_were_discarded_before() {
    let content = image(4, async |_| {});
    let sim = Sim::new(1);
    let disk = SimDisk::new(&sim, Config::default(), content);
    sim.block_on(async move {
        let image = open(&disk).await;
        unmap(&image, ByteRange::between(0, CLUSTER), Intent::Discard, 0).await.unwrap();
        disk.fail(Fault::nth(0, errno::EIO).of(OperationKind::Read));
        image.flush(SyncMode::Data).await.expect("the changes are durable");
        assert!(disk.has_failed(), "refcounts were not read");
        disk.take_log();
        image.close().await.expect("the refcounts are readable again");
        let is_punch = |operation: &Operation| operation.kind() == OperationKind::Discard;
        assert!(disk.take_log().iter().any(is_punch), "the host keeps the space");
    });
}

/// The clusters of an earlier discard cannot be freed in the writeback that the write waits for.
#[test]
fn a_write_does_not_fail_for_clusters_that_were_discarded_before() {
    // The guest's bytes of an L2 table, and the host's bytes that a slice of refcounts counts.
    let (table, counted) = (CLUSTER / 8 * CLUSTER, CLUSTER / 2 * CLUSTER);
    let sim = Sim::new(1);
    let disk = SimDisk::new(&sim, Config::default(), Vec::new());
    sim.block_on(async move {
        let options = CreateOptions { cluster_size: CLUSTER, ..CreateOptions::new(64 * table) };
        create(&disk, &options).await.unwrap();
        let image = open(&disk).await;
        write(&image, 0, &vec![1; (counted + table) as usize], 0).await.unwrap();
        image.close().await.unwrap();
        let options = OpenOptions { cache_size: 16 * CLUSTER, ..OpenOptions::default() };
        let image = Qcow2::open(disk.clone(), options).await.unwrap();
        // Afterwards the refcounts of new clusters are in memory, but not those of the first ones.
        for at in 6..40 {
            write(&image, at * table, &[2; 512], 0).await.unwrap();
        }
        unmap(&image, ByteRange::between(0, CLUSTER), Intent::Discard, 0).await.unwrap();
        disk.fail(Fault::nth(0, errno::EIO).of(OperationKind::Read));
        for at in 40..64 {
            write(&image, at * table, &[2; 512], 0).await.expect("space and tables are good");
        }
        assert!(disk.has_failed(), "no writeback read refcounts");
        image.close().await.expect("the refcounts are readable again");
    });
}

/// The clusters of one L2 table lie in many slices of refcounts.
#[test]
fn no_more_refcounts_are_dirty_at_once_than_the_limit_when_clusters_are_freed() {
    const SMALL: u64 = 512;
    const TABLE: u64 = SMALL / 8 * SMALL;
    // The clusters that a slice of refcounts counts.
    const COUNTED: u64 = SMALL / 2;
    let sim = Sim::new(1);
    let disk = SimDisk::new(&sim, Config::default(), Vec::new());
    let used = disk.clone();
    sim.block_on(async move {
        let size = 2 * SMALL / 8 * COUNTED * SMALL;
        let options = CreateOptions { cluster_size: SMALL, ..CreateOptions::new(size) };
        create(&used, &options).await.unwrap();
        let image = open(&used).await;
        let filler = (COUNTED - 1) * SMALL;
        for at in 0..TABLE / SMALL {
            write(&image, at * SMALL, &[1; SMALL as usize], 0).await.unwrap();
            write(&image, TABLE + at * filler, &vec![1; filler as usize], 0).await.unwrap();
        }
        image.close().await.unwrap();
        let options = OpenOptions { cache_size: 16 * SMALL, ..OpenOptions::default() };
        let image = Qcow2::open(used.clone(), options).await.unwrap();
        used.take_log();
        unmap(&image, ByteRange::between(0, TABLE), Intent::Discard, 0).await.unwrap();
        image.close().await.unwrap();
    });
    let content = disk.content();
    let word = |at: u64| u64::from_be_bytes(content[at as usize..][..8].try_into().unwrap());
    let table = word(48);
    let blocks: Vec<_> = (0..SMALL / 8).map(|index| word(table + 8 * index)).collect();
    let mut together = vec![0];
    for operation in disk.take_log() {
        match operation {
            Operation::Flush(_) => together.push(0),
            Operation::Write(range, _) if blocks.contains(&range.offset()) => {
                *together.last_mut().unwrap() += 1;
            }
            _ => {}
        }
    }
    assert!(together.iter().sum::<u64>() > 32, "{together:?}");
    assert!(together.iter().all(|&writes| writes <= 16), "{together:?}");
}

/// Counts the warnings that contain some words.
struct Warnings(&'static str, Arc<AtomicU64>);

impl Visit for Warnings {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" && format!("{value:?}").contains(self.0) {
            self.1.fetch_add(1, Relaxed);
        }
    }
}

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        event.record(&mut Self(self.0, Arc::clone(&self.1)));
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn clusters_that_cannot_be_freed_are_told_once() {
    let content = image(4, async |_| {});
    let sim = Sim::new(1);
    let disk = SimDisk::new(&sim, Config::default(), content);
    let count = Arc::new(AtomicU64::new(0));
    let warnings = Warnings("'blockhouse check -r leaks'", Arc::clone(&count));
    tracing::subscriber::with_default(warnings, || {
        sim.block_on(async move {
            let image = open(&disk).await;
            for at in 0..2 {
                let cluster = ByteRange::between(at * CLUSTER, (at + 1) * CLUSTER);
                unmap(&image, cluster, Intent::Discard, 0).await.unwrap();
                disk.fail(Fault::chance(1.0, errno::EIO).of(OperationKind::Read));
                image.flush(SyncMode::Data).await.expect("the changes are durable");
                disk.clear_faults();
            }
        });
    });
    assert_eq!(count.load(Relaxed), 1);
}
