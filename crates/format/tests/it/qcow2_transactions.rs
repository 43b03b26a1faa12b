//! Changes of the whole image that fail or are dropped, beside other changes of the image.

use std::time::Duration;

use blockhouse_core::{Result, errno};
use blockhouse_format::qcow2::{CreateOptions, NewSnapshot, OpenOptions, Qcow2, create};
use blockhouse_sim::{Config, Fault, OperationKind, Sim, SimDisk};

use crate::common::write;

const CLUSTER: u64 = 4096;
const SIZE: u64 = 64 * CLUSTER;

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
