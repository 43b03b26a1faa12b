//! Reads of compressed images: each cluster is unpacked once for small reads in a row, and never
//! shown after it was overwritten.

use std::rc::Rc;

use blockhouse_core::{Buffer, ByteRange, Durability, Fallback, Request, Unmap};
use blockhouse_disk::{Disk, ImageFormat, Options};
use blockhouse_sim::{Config, Sim, SimDisk};

const CLUSTER: u64 = 4096;
const SIZE: u64 = 96 << 10;
/// Made by QEMU: all clusters are compressed but two, which were overwritten.
const IMAGES: [&[u8]; 2] = [
    include_bytes!("../../../../fuzz/corpus/qcow2_open/qemu-zlib"),
    include_bytes!("../../../../fuzz/corpus/qcow2_open/qemu-zstd"),
];
const PACKED: u64 = SIZE / CLUSTER - 2;

/// The content of the images.
fn byte_at(at: u64) -> u8 {
    if (9000..14_000).contains(&at) { 3 } else { (at / 100 % 251) as u8 }
}

fn open(sim: &Sim, image: &[u8]) -> Rc<Disk<SimDisk>> {
    let storage = SimDisk::new(sim, Config::default(), image.to_vec());
    Rc::new(sim.block_on(async {
        Disk::open(storage, ImageFormat::Qcow2, Options::default()).await.unwrap()
    }))
}

async fn read(disk: &Disk<SimDisk>, offset: u64, length: u64) -> Vec<u8> {
    let mut buffer = Buffer::new(length as usize);
    disk.submit(Request::Read { offset, into: buffer.lend() }).await.unwrap();
    buffer.bytes().to_vec()
}

async fn assert_reads(disk: &Disk<SimDisk>, offset: u64, length: u64) {
    let expected: Vec<u8> = (offset..offset + length).map(byte_at).collect();
    assert!(read(disk, offset, length).await == expected, "{length} bytes at {offset}");
}

#[test]
fn small_reads_in_a_row_unpack_each_cluster_once() {
    for image in IMAGES {
        let sim = Sim::new(1);
        let disk = open(&sim, image);
        let reader = Rc::clone(&disk);
        sim.block_on(async move {
            for offset in (0..SIZE).step_by(512) {
                assert_reads(&reader, offset, 512).await;
            }
        });
        assert_eq!(disk.stats().counters().decompressed, PACKED);
    }
}

#[test]
fn reads_of_one_cluster_at_the_same_time_unpack_it_once() {
    let sim = Sim::new(2);
    let disk = open(&sim, IMAGES[0]);
    for offset in (0..CLUSTER).step_by(512) {
        let disk = Rc::clone(&disk);
        drop(sim.spawn(async move { assert_reads(&disk, offset, 512).await }));
    }
    sim.run();
    assert_eq!(disk.stats().counters().decompressed, 1);
    assert_eq!(disk.stats().counters().in_flight, 0);
}

#[test]
fn what_was_unpacked_is_forgotten_when_it_changes() {
    let sim = Sim::new(3);
    let disk = open(&sim, IMAGES[0]);
    sim.block_on(async move {
        assert_reads(&disk, 512, 512).await;
        let mut buffer = Buffer::new(512);
        buffer.bytes_mut().fill(9);
        let (from, durability) = (buffer.lend(), Durability::None);
        disk.submit(Request::Write { offset: 512, from, durability }).await.unwrap();
        assert_eq!(read(&disk, 512, 512).await, [9; 512]);
        assert_reads(&disk, 1024, 512).await;

        assert_reads(&disk, CLUSTER + 512, 512).await;
        let range = ByteRange::between(CLUSTER, 2 * CLUSTER);
        let (unmap, fallback) = (Unmap::Allowed, Fallback::Allowed);
        disk.submit(Request::WriteZeroes { range, unmap, fallback, durability }).await.unwrap();
        assert_eq!(read(&disk, CLUSTER + 512, 512).await, [0; 512]);
    });
}
