//! Requests in flight on an image while another one takes its place come to their end, and the
//! image is closed after that.

use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{Buffer, ByteRange, Durability, Fua, Request};
use blockhouse_disk::{
    Access, Backing, BlockStatusCache, Disk, Image, ImageFormat, Options, Stage,
};
use blockhouse_format::qcow2::{self, CreateOptions};
use blockhouse_sim::{Config, Sim, SimDisk};

use crate::common::{DATA, steady};

const SIZE: u64 = 1 << 20;
/// Small, so that requests go on from one to the next for long.
const CLUSTER: u64 = 4 << 10;
/// The value of every byte of the disks.
const CONTENT: u8 = 5;

fn storage(sim: &Sim, needs_close: bool, content: Vec<u8>) -> SimDisk {
    SimDisk::new(sim, Config { needs_close, ..steady() }, content)
}

fn raw(storage: SimDisk, options: Options) -> Arc<Disk<SimDisk>> {
    Arc::new(Disk::raw(storage, options).expect("a raw disk"))
}

async fn open(storage: SimDisk) -> Image<SimDisk> {
    Image::open(storage, ImageFormat::Qcow2, Options::default()).await.expect("an image")
}

fn write(offset: u64, length: u64, durability: Durability) -> Request {
    let mut buffer = Buffer::new(length as usize);
    buffer.bytes_mut().fill(CONTENT);
    Request::Write { offset, from: buffer.lend(), durability }
}

/// A disk that was just opened, every second cluster of which is its base's.
async fn half_of_a_base(
    image: SimDisk,
    base: SimDisk,
    is_base_attached: bool,
) -> Arc<Disk<SimDisk>> {
    let backing = Some(Backing { name: b"base".to_vec(), format: Some("raw".into()) });
    let options = CreateOptions { backing, cluster_size: CLUSTER, ..CreateOptions::new(SIZE) };
    qcow2::create(&image, &options).await.expect("an image");
    let below = || {
        let read_only = Options { access: Access::ReadOnly, ..Options::default() };
        Image::raw(base.clone(), read_only).expect("a raw image")
    };
    let writer = Disk::new(open(image.clone()).await.with_backing(&below()));
    for offset in (0..SIZE).step_by(2 * CLUSTER as usize) {
        writer.submit(write(offset, CLUSTER, Durability::None)).await.expect("a write");
    }
    writer.close().await.expect("a close");
    let disk = Arc::new(Disk::new(open(image).await.with_backing(&below())));
    if is_base_attached {
        // As a commit does that is cancelled later.
        disk.jobs().attach_base(raw(base, Options::default())).await.expect("a base");
    }
    disk
}

async fn switch(disk: &Disk<SimDisk>, next: Image<SimDisk>) {
    let replaced = disk
        .quiesced()
        .await
        .expect("no change in flight")
        .switch_to(Arc::new(next))
        .expect("a successor");
    replaced.close().await.expect("the replaced image is closed");
}

/// The work that is begun before the switch.
#[derive(Clone, Copy, Debug)]
enum Work {
    Read,
    BlockStatus,
    MapEntry,
    DurableWrite,
}

impl Work {
    async fn carry_out(self, disk: &Disk<SimDisk>) {
        let whole = ByteRange::between(0, SIZE);
        match self {
            Self::Read => {
                let mut buffer = Buffer::new(SIZE as usize);
                let read = Request::Read { offset: 0, into: buffer.lend() };
                disk.submit(read).await.expect("a read");
                assert!(buffer.bytes().iter().all(|byte| *byte == CONTENT));
            }
            Self::BlockStatus => {
                let mut cache = BlockStatusCache::default();
                disk.block_status(whole, &mut cache).await.expect("a status");
            }
            Self::MapEntry => {
                let mut cache = BlockStatusCache::default();
                disk.map_entry(whole, &mut cache).await.expect("an entry");
            }
            Self::DurableWrite => {
                let request = write(CLUSTER, 512, Durability::Data);
                disk.submit(request).await.expect("a write");
            }
        }
    }
}

#[test]
fn an_image_is_closed_after_what_is_in_flight_on_it_and_its_base() {
    for work in [Work::Read, Work::BlockStatus, Work::MapEntry, Work::DurableWrite] {
        for (image_needs, base_needs, is_base_attached) in
            [(true, false, false), (true, true, true), (false, true, true)]
        {
            for step in 0..40 {
                let sim = Sim::new(step);
                let image = storage(&sim, image_needs, Vec::new());
                let base = storage(&sim, base_needs, vec![CONTENT; SIZE as usize]);
                let next = storage(&sim, false, vec![CONTENT; SIZE as usize]);
                let inner = sim.clone();
                sim.block_on(async move {
                    let disk = half_of_a_base(image, base, is_base_attached).await;
                    let used = Arc::clone(&disk);
                    let task = inner.spawn(async move { work.carry_out(&used).await });
                    inner.sleep(Duration::from_micros(step * DATA / 2 + 1)).await;
                    switch(&disk, Image::raw(next, Options::default()).expect("an image")).await;
                    task.join().await;
                });
            }
        }
    }
}

/// The first switch is waited for, the second one comes while the writes are made durable where the
/// first one led to.
#[test]
fn a_durable_write_that_waited_for_a_switch_ends_before_its_image_is_closed() {
    for first_needs in [false, true] {
        for step in 0..60 {
            let sim = Sim::new(step);
            let zeros = vec![0; SIZE as usize];
            let first = raw(storage(&sim, first_needs, zeros.clone()), Options::default());
            let config = Config { fua: Fua::Emulated, ..steady() };
            let second = SimDisk::new(&sim, config, Vec::new());
            let third = storage(&sim, false, zeros);
            let inner = sim.clone();
            sim.block_on(async move {
                qcow2::create(&second, &CreateOptions::new(SIZE)).await.expect("an image");
                let second = open(second).await;
                let quiesced = first.quiesced().await.expect("no limit");
                let tasks: Vec<_> = (0..4)
                    .map(|cluster| {
                        let disk = Arc::clone(&first);
                        let request = write(cluster * CLUSTER, 4096, Durability::Data);
                        inner.spawn(async move { disk.submit(request).await })
                    })
                    .collect();
                inner.sleep(Duration::from_micros(DATA)).await;
                let replaced = quiesced.switch_to(Arc::new(second)).expect("a successor");
                replaced.close().await.expect("a close");
                inner.sleep(Duration::from_micros(step * DATA / 2)).await;
                switch(&first, Image::raw(third, Options::default()).expect("an image")).await;
                for task in tasks {
                    task.join().await.expect("a write");
                }
            });
        }
    }
}

/// A stop does not wait for a backing file that does not answer.
#[test]
fn a_disk_is_closed_while_its_base_does_not_answer() {
    for needs_close in [false, true] {
        let (sim, dead) = (Sim::new(1), Sim::new(2));
        let image = storage(&sim, needs_close, Vec::new());
        let hung = storage(&dead, false, vec![CONTENT; SIZE as usize]);
        let inner = sim.clone();
        sim.block_on(async move {
            let backing = Some(Backing { name: b"base".to_vec(), format: Some("raw".into()) });
            let options = CreateOptions { backing, ..CreateOptions::new(SIZE) };
            qcow2::create(&image, &options).await.expect("an image");
            let read_only = Options { access: Access::ReadOnly, ..Options::default() };
            let below = Image::raw(hung, read_only).expect("a raw image");
            let disk = Arc::new(Disk::new(open(image).await.with_backing(&below)));
            let used = Arc::clone(&disk);
            let read = inner.spawn(async move { Work::Read.carry_out(&used).await });
            inner.sleep(Duration::from_millis(1)).await;
            disk.close().await.expect("a close");
            assert!(read.output().is_none(), "the base does not answer");
        });
    }
}

/// The reads of data at the storages of the disk.
fn data_reads(disk: &Disk<SimDisk>) -> u64 {
    let stages = disk.stats().metrics().stages;
    let reads = stages.iter().filter(|one| (one.stage, one.operation) == (Stage::Host, "read"));
    reads.map(|one| one.durations.count()).sum()
}

#[test]
fn each_operation_of_a_storage_is_counted_once_whatever_replaces_the_image() {
    let sim = Sim::new(1);
    let [image, overlay] = [0; 2].map(|_| storage(&sim, false, Vec::new()));
    let [base, next] = [0; 2].map(|_| storage(&sim, false, vec![CONTENT; SIZE as usize]));
    sim.block_on(async move {
        let disk = half_of_a_base(image, base.clone(), false).await;
        Work::Read.carry_out(&disk).await;
        let reads = data_reads(&disk);
        assert!(reads > 0);
        disk.jobs().attach_base(raw(base, Options::default())).await.expect("a base");
        assert_eq!(data_reads(&disk), reads, "the base is opened again");
        let backing = Some(Backing { name: b"image".to_vec(), format: Some("qcow2".into()) });
        let options = CreateOptions { backing, ..CreateOptions::new(SIZE) };
        qcow2::create(&overlay, &options).await.expect("an overlay");
        let overlay = open(overlay).await.over(disk.image());
        for next in [overlay, Image::raw(next, Options::default()).expect("an image")] {
            let quiesced = disk.quiesced().await.expect("no limit");
            let replaced = quiesced.switch_to(Arc::new(next)).expect("a successor");
            replaced.close_as_layer().await.expect("a close");
            assert_eq!(data_reads(&disk), reads, "another image");
        }
    });
}
