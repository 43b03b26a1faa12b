//! Zero writes and discards of parts of clusters in images with subclusters: tables say it, no data
//! is written, and a cluster without data is given back.

use blockhouse_core::{Buffer, ByteRange, Durability, Fallback, Request, Unmap};
use blockhouse_disk::{BlockStatus, BlockStatusCache, Disk, Image, ImageFormat, Options};
use blockhouse_format::qcow2::{self, Backing, CheckReport, CreateOptions, Qcow2, Switch};
use blockhouse_sim::{Config, OperationKind, Sim, SimDisk};

const CLUSTER: u64 = 16 << 10;
const UNIT: u64 = 512;

/// How a range is emptied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Zero(Unmap),
    Discard,
}

async fn empty(disk: &Disk<SimDisk>, range: ByteRange, how: How) {
    let (fallback, durability) = (Fallback::Allowed, Durability::None);
    let request = match how {
        How::Zero(unmap) => Request::WriteZeroes { range, unmap, fallback, durability },
        How::Discard => Request::Discard { range, durability },
    };
    disk.submit(request).await.unwrap();
}

async fn read(disk: &Disk<SimDisk>, offset: u64, length: u64) -> Vec<u8> {
    let mut buffer = Buffer::new(length as usize);
    disk.submit(Request::Read { offset, into: buffer.lend() }).await.unwrap();
    buffer.bytes().to_vec()
}

/// Two clusters of data, the first of which is emptied unit by unit from the end on; what a check
/// says.
fn emptied(how: How, is_backed: bool) -> CheckReport {
    let sim = Sim::new(1);
    let storage = SimDisk::new(&sim, Config::default(), Vec::new());
    let base = SimDisk::new(&sim, Config::default(), vec![7; 2 * CLUSTER as usize]);
    let backing = Backing { name: b"base".to_vec(), format: Some("raw".into()) };
    let options = CreateOptions {
        cluster_size: CLUSTER,
        extended_l2: Switch::On,
        backing: is_backed.then_some(backing),
        ..CreateOptions::new(2 * CLUSTER)
    };
    let file = storage.clone();
    sim.block_on(async move {
        qcow2::create(&file, &options).await.unwrap();
        let image =
            Image::open(file.clone(), ImageFormat::Qcow2, Options::default()).await.unwrap();
        let disk = Disk::new(if is_backed {
            image.with_backing(&Image::raw(base, Options::default()).unwrap())
        } else {
            image
        });
        let mut buffer = Buffer::new(2 * CLUSTER as usize);
        buffer.bytes_mut().fill(1);
        let (from, durability) = (buffer.lend(), Durability::None);
        disk.submit(Request::Write { offset: 0, from, durability }).await.unwrap();
        file.take_log();
        for unit in (0..CLUSTER / UNIT).rev() {
            let range = ByteRange::between(unit * UNIT, (unit + 1) * UNIT);
            empty(&disk, range, how).await;
            let rest = ByteRange::between(unit * UNIT, 2 * CLUSTER);
            let (status, length) =
                disk.block_status(rest, &mut BlockStatusCache::default()).await.unwrap();
            assert!(status != BlockStatus::Data && length == CLUSTER - unit * UNIT);
        }
        let is_write = |one: &blockhouse_sim::Operation| one.kind() == OperationKind::Write;
        assert!(!file.take_log().iter().any(is_write), "zeros were written");
        assert!(read(&disk, 0, CLUSTER).await.iter().all(|&byte| byte == 0));
        assert!(read(&disk, CLUSTER, CLUSTER).await.iter().all(|&byte| byte == 1));
        disk.close().await.unwrap();
        let image = Qcow2::open(file, qcow2::OpenOptions::default()).await.unwrap();
        let report = qcow2::check(&image).await.unwrap();
        assert_eq!((report.corruptions, report.leaks), (0, 0), "{:?}", report.problems);
        report
    })
}

#[test]
fn a_cluster_whose_last_unit_of_data_goes_is_given_back() {
    for is_backed in [false, true] {
        for how in [How::Zero(Unmap::Allowed), How::Discard] {
            assert_eq!(emptied(how, is_backed).allocated_clusters, 1, "{how:?} {is_backed}");
        }
    }
}

#[test]
fn a_cluster_that_must_keep_its_space_keeps_it() {
    for is_backed in [false, true] {
        assert_eq!(emptied(How::Zero(Unmap::Forbidden), is_backed).allocated_clusters, 2);
    }
}
