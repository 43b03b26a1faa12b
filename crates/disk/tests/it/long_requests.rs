//! Requests longer than one part hold bounded resources, and let other requests run.

use std::cell::Cell;
use std::rc::Rc;

use blockhouse_core::{Buffer, ByteRange, Durability, Request, SyncMode, errno, yield_now};
use blockhouse_disk::{DetectZeroes, Disk, ImageFormat, Options};
use blockhouse_format::qcow2::{self, CreateOptions};
use blockhouse_sim::{Config, Fault, Latency, Operation, OperationKind, Sim, SimDisk};

const MIB: u64 = 1 << 20;
/// Bytes of the longest part.
const MAX_PART: u64 = 4 * MIB;

fn config() -> Config {
    Config { latency: Latency::fixed(10, 100), ..Config::default() }
}

/// An empty qcow2 image of 2 TiB.
fn holes(options: Options) -> (Sim, Rc<Disk<SimDisk>>) {
    let sim = Sim::new(1);
    let storage = SimDisk::new(&sim, config(), Vec::new());
    let disk = sim.block_on(async move {
        qcow2::create(&storage, &CreateOptions::new(2 << 40)).await.unwrap();
        Disk::open(storage, ImageFormat::Qcow2, options).await.unwrap()
    });
    (sim, Rc::new(disk))
}

/// The number of 4 KiB reads that another task completes while the request runs.
fn served_beside(sim: &Sim, disk: &Rc<Disk<SimDisk>>, request: Request) -> usize {
    let long = {
        let disk = Rc::clone(disk);
        sim.spawn(async move { disk.submit(request).await })
    };
    let served = Rc::new(Cell::new(0));
    let neighbour = {
        let (disk, served) = (Rc::clone(disk), Rc::clone(&served));
        sim.spawn(async move {
            let mut buffer = Buffer::new(4096);
            loop {
                disk.submit(Request::Read { offset: 0, into: buffer.lend() }).await.unwrap();
                served.set(served.get() + 1);
                yield_now().await;
            }
        })
    };
    sim.block_on(async move { long.join().await.unwrap() });
    neighbour.cancel();
    served.get()
}

#[test]
fn a_neighbour_is_served_between_the_steps_of_a_long_request() {
    let (sim, disk) = holes(Options::default());
    let mut memory = Buffer::new(64 << 20);
    memory.bytes_mut()[..4096].fill(1);
    let read = Request::Read { offset: MIB, into: memory.lend() };
    // The read has 512 steps. After each step either task may run next.
    let served = served_beside(&sim, &disk, read);
    assert!((200..1000).contains(&served), "{served} beside a read of 64 MiB");
    assert!(memory.bytes()[..4096].iter().all(|&byte| byte == 0));

    // 2048 look-ups of 512 MiB each.
    let terabyte = ByteRange::between(0, 1 << 40);
    for request in [
        Request::Prefetch { range: terabyte },
        Request::Discard { range: terabyte, durability: Durability::None },
    ] {
        let what = format!("{request:?}");
        let served = served_beside(&sim, &disk, request);
        assert!((10..200).contains(&served), "{served} beside {what}");
    }
}

#[test]
fn a_neighbour_is_served_while_zeros_are_looked_for_and_copied() {
    let detect_zeroes = DetectZeroes::Unmap;
    let (sim, disk) = holes(Options { detect_zeroes, ..Options::default() });
    let mut memory = Buffer::new(16 << 20);
    let durability = Durability::None;
    let write = Request::Write { offset: 0, from: memory.lend(), durability };
    let served = served_beside(&sim, &disk, write);
    assert!((50..400).contains(&served), "{served} beside a write of zeros");
    // The read begins inside a block, so it uses a bounce buffer.
    let into = memory.lend_range(0, 8 << 20);
    let served = served_beside(&sim, &disk, Request::Read { offset: 1 << 30 | 1, into });
    assert!((10..400).contains(&served), "{served} beside an unaligned read");
}

#[test]
fn after_an_error_nothing_more_goes_down() {
    let sim = Sim::new(1);
    let storage = SimDisk::new(&sim, config(), vec![0; 128 << 20]);
    let disk = Rc::new(Disk::raw(storage.clone(), Options::default()).unwrap());
    storage.fail(Fault::nth(0, errno::EIO));
    let mut memory = Buffer::new(128 << 20);
    let (into, submitted) = (memory.lend(), Rc::clone(&disk));
    let read =
        sim.block_on(async move { submitted.submit(Request::Read { offset: 0, into }).await });
    assert_eq!(read.unwrap_err().errno(), errno::EIO);
    let (begun, ended) = storage.counts();
    assert!(begun == ended && begun < 32, "{begun} of 32 parts");
}

#[test]
fn a_durable_write_that_is_cut_is_made_durable_once() {
    let sim = Sim::new(1);
    let storage = SimDisk::new(&sim, config(), vec![0; 16 << 20]);
    let disk = Rc::new(Disk::raw(storage.clone(), Options::default()).unwrap());
    let write = |offset: u64, length: u64| {
        let (disk, mut memory) = (Rc::clone(&disk), Buffer::new(length as usize));
        memory.bytes_mut().iter_mut().enumerate().for_each(|(at, byte)| *byte = (at >> 16) as u8);
        let (from, durability) = (memory.lend(), Durability::Data);
        storage.take_log();
        sim.block_on(async move { disk.submit(Request::Write { offset, from, durability }).await })
            .unwrap();
        storage.take_log()
    };
    let whole = write(4096, MAX_PART);
    let range = ByteRange::between(4096, 4096 + MAX_PART);
    assert_eq!(whole, [Operation::Write(range, Durability::Data)], "one part is one operation");

    let cut = write(4096, 12 * MIB);
    let (flush, parts) = cut.split_last().unwrap();
    assert_eq!(*flush, Operation::Flush(SyncMode::Data));
    assert!(
        parts.len() == 4 && parts.iter().all(|one| one.kind() == OperationKind::Write),
        "{parts:?}"
    );
    let content = storage.content();
    for at in (0..12 << 20).step_by(1 << 16) {
        assert_eq!(content[4096 + at], (at >> 16) as u8, "byte {at}");
    }
}
