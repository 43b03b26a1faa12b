//! Tables of snapshots and of bitmaps at the end of the file: closing does not cut them off, and an
//! image that lacks them is not opened for writing.

use std::time::Duration;

use blockhouse_core::{ByteRange, ErrorKind, Result};
use blockhouse_format::Intent;
use blockhouse_format::qcow2::{
    Access, CreateOptions, NewBitmap, NewSnapshot, OpenOptions, Qcow2, Repair, create, repair,
};
use blockhouse_sim::{Config, Sim, SimDisk};

use crate::common::{unmap, write};

const CLUSTER: usize = 4096;
const SIZE: u64 = 16 * CLUSTER as u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Table {
    Snapshots,
    SnapshotL1,
    Bitmap,
}

const TABLES: [Table; 3] = [Table::Snapshots, Table::SnapshotL1, Table::Bitmap];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Counted {
    Yes,
    /// Its refcount is zero, as if another program had damaged it.
    No,
}

fn word(image: &[u8], at: usize) -> usize {
    u64::from_be_bytes(image[at..at + 8].try_into().unwrap()) as usize
}

/// An image whose last cluster is this table; and the table's offset.
fn image_that_ends_with(table: Table, counted: Counted) -> (Vec<u8>, usize) {
    let sim = Sim::new(0);
    let disk = SimDisk::new(&sim, Config::default(), Vec::new());
    let made = disk.clone();
    sim.block_on(async move {
        let cluster_size = CLUSTER as u64;
        create(&made, &CreateOptions { cluster_size, ..CreateOptions::new(SIZE) }).await.unwrap();
        let image = Qcow2::open(made, OpenOptions::default()).await.unwrap();
        write(&image, 0, &[1; 4 * CLUSTER], 0).await.unwrap();
        let (created, vm_clock) = (Duration::ZERO, Duration::ZERO);
        let new = NewSnapshot { name: "first".into(), created, vm_clock };
        image.snapshots().create(&new, None).await.unwrap();
        write(&image, 0, &[2; 4 * CLUSTER], 0).await.unwrap();
        let new = NewBitmap { name: "changes".into(), granularity: None, is_enabled: false };
        image.bitmaps().add(&new).await.unwrap();
        image.close().await.unwrap();
    });
    let mut image = disk.content();
    let snapshots = word(&image, 64);
    let magic = 0x2385_2875_u32.to_be_bytes();
    let extension = image[..512].windows(4).position(|window| window == magic).unwrap();
    let directory = word(&image, extension + 24);
    let pointer = match table {
        Table::Snapshots => 64,
        Table::SnapshotL1 => snapshots,
        Table::Bitmap => directory,
    };
    let (old, new) = (word(&image, pointer), image.len().next_multiple_of(CLUSTER));
    image.resize(new + CLUSTER, 0);
    image.copy_within(old..old + CLUSTER, new);
    image[pointer..pointer + 8].copy_from_slice(&(new as u64).to_be_bytes());
    if counted == Counted::Yes {
        let block = word(&image, word(&image, 48));
        image[block + new / CLUSTER * 2 + 1] = 1;
    }
    (image, new)
}

async fn open(disk: &SimDisk, access: Access) -> Result<Qcow2<SimDisk>> {
    Qcow2::open(disk.clone(), OpenOptions { access, ..OpenOptions::default() }).await
}

#[test]
fn closing_does_not_cut_them_off_whatever_refcounts_say() {
    for table in TABLES {
        let (image, at) = image_that_ends_with(table, Counted::No);
        let sim = Sim::new(1);
        let disk = SimDisk::new(&sim, Config::default(), image.clone());
        let used = disk.clone();
        sim.block_on(async move {
            let image = open(&used, Access::ReadWrite).await.unwrap();
            let cluster = ByteRange::between(0, CLUSTER as u64);
            unmap(&image, cluster, Intent::Discard, 0).await.unwrap();
            image.close().await.unwrap();
        });
        let left = disk.content();
        assert!(left.get(at..at + CLUSTER) == Some(&image[at..]), "{table:?}: {}", left.len());
    }
}

#[test]
fn an_image_that_lacks_one_is_opened_only_for_reading() {
    for table in TABLES {
        let (mut image, at) = image_that_ends_with(table, Counted::Yes);
        for is_cut in [false, true] {
            if is_cut {
                image.truncate(at);
            }
            let sim = Sim::new(1);
            let disk = SimDisk::new(&sim, Config::default(), image.clone());
            sim.block_on(async move {
                open(&disk, Access::ReadOnly).await.unwrap();
                let refused = open(&disk, Access::ReadWrite).await.err().map(|error| error.kind());
                assert_eq!(refused, is_cut.then_some(ErrorKind::Corrupt), "{table:?}");
            });
        }
    }
}

#[test]
fn an_image_that_lacks_one_can_be_written_after_a_repair() {
    for table in TABLES {
        let (mut image, at) = image_that_ends_with(table, Counted::Yes);
        image.truncate(at);
        let sim = Sim::new(1);
        let disk = SimDisk::new(&sim, Config::default(), image);
        sim.block_on(async move {
            let report = repair(&disk, Repair::All).await.unwrap();
            assert_eq!(report.left.corruptions, 0, "{table:?}: {:?}", report.left);
            let opened = open(&disk, Access::ReadWrite).await.unwrap();
            // New clusters may be where the table was, so nothing else may refer to that place.
            for cluster in 4..16 {
                write(&opened, cluster * CLUSTER as u64, &[3; CLUSTER], 0).await.unwrap();
            }
            if table == Table::Bitmap {
                assert!(opened.bitmaps().list().await.unwrap().is_empty());
            }
            opened.close().await.unwrap();
            let left = repair(&disk, Repair::All).await.unwrap().found;
            assert_eq!(left.corruptions, 0, "{table:?}: {left:?}");
        });
    }
}
