//! First durable writes into space that was prepared with written zeros: what they cost, when space
//! is prepared, and that it is given back; and crashes at every point, none of which shows what the
//! host had in such space before.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;

use blockhouse_core::{
    ByteRange, Durability, ErrorKind, Request, Result, Storage, SyncMode, ToolProgress, Unmap,
    errno,
};
use blockhouse_disk::{Disk, ImageFormat, Options, take_space};
use blockhouse_format::SpaceMode;
use blockhouse_format::qcow2::{self, CreateOptions, Qcow2};
use blockhouse_sim::{
    Config, Fault, Latency, Operation, OperationKind, Rng, Sim, SimDisk, Support,
};

use crate::common::{Rig, steady, write};
use crate::crashed::{plain_config, read_all};
use crate::storages::{Broken, Policy};

pub const CLUSTER: u64 = 65_536;
pub const SIZE: u64 = 512 * CLUSTER;

const FUA: Durability = Durability::Data;
const PLAIN: Durability = Durability::None;

pub fn able() -> Config {
    Config { prepare_zeroes: Support::Yes, free_space: Some(1 << 40), ..steady() }
}

/// A disk over a new image whose first tables are made, and where a durable write has taken a new
/// cluster.
pub fn rig(config: Config) -> Rig {
    let rig = Rig::qcow2(config, CreateOptions::new(SIZE));
    rig.submit(write(SIZE - CLUSTER, 4096, 1, PLAIN)).unwrap();
    rig.submit(Request::Flush).unwrap();
    rig.submit(write(SIZE - 2 * CLUSTER, 4096, 1, FUA)).unwrap();
    rig.log();
    rig
}

/// The operations; reads of tables left out.
pub fn changes(rig: &Rig) -> Vec<Operation> {
    rig.log().into_iter().filter(|operation| !matches!(operation, Operation::Read(_))).collect()
}

fn prepared(done: &[Operation]) -> Vec<u64> {
    let length = |one: &Operation| match one {
        Operation::PrepareZeroes(range) => Some(range.length()),
        _ => None,
    };
    done.iter().filter_map(length).collect()
}

#[test]
fn a_first_durable_write_into_prepared_space_is_fua_writes_of_its_own_bytes() {
    let rig = rig(able());
    rig.submit(write(0, 4096, 3, FUA)).unwrap();
    let done = changes(&rig);
    let [
        Operation::PrepareZeroes(_),
        Operation::Flush(SyncMode::Full),
        Operation::Write(data, FUA),
        Operation::Write(refcount, FUA),
        Operation::Write(entry, FUA),
    ] = done[..]
    else {
        panic!("{done:?}");
    };
    assert_eq!(data.length(), 4096, "the zeros around the guest's bytes are there");
    assert!(refcount.length() <= 4096 && entry.length() <= 4096);
    for cluster in (2..42).step_by(2) {
        rig.submit(write(cluster * CLUSTER + 8192, 4096, 3, FUA)).unwrap();
        let done = changes(&rig);
        let lengths = done.iter().map(|one| match one {
            Operation::Write(range, FUA) => range.length(),
            other => panic!("{other:?} among {done:?}"),
        });
        assert_eq!(lengths.max(), Some(4096), "three of its own and nothing else: {done:?}");
        assert_eq!(done.len(), 3, "{done:?}");
    }
    assert_eq!(rig.read(2 * CLUSTER, 8192), [0; 8192]);
    assert_eq!(rig.read(2 * CLUSTER + 8192, 4096), [3; 4096]);
    rig.submit(write(0, 4096, 4, FUA)).unwrap();
    assert!(matches!(changes(&rig)[..], [Operation::Write(_, FUA)]), "from then on it is mapped");
}

#[test]
fn plain_writes_prepare_nothing() {
    let rig = Rig::qcow2(able(), CreateOptions::new(SIZE));
    for cluster in 0..200 {
        rig.submit(write(cluster * CLUSTER, 4096, 1, PLAIN)).unwrap();
    }
    rig.submit(Request::Flush).unwrap();
    assert!(prepared(&changes(&rig)).is_empty());
}

#[test]
fn space_is_prepared_in_pieces_and_only_while_durable_writes_need_it() {
    let rig = rig(able());
    for cluster in 0..300 {
        rig.submit(write(cluster * CLUSTER, 4096, 3, FUA)).unwrap();
    }
    let done = changes(&rig);
    let pieces = prepared(&done);
    let flushes = done.iter().filter(|one| matches!(one, Operation::Flush(_))).count();
    assert!((4..=6).contains(&pieces.len()), "{pieces:?}");
    assert_eq!(pieces[0], 64 * CLUSTER);
    assert_eq!(flushes, pieces.len(), "one for each, and none for a write");
    // The rest of the last piece is used up, and no more is prepared.
    for cluster in 300..500 {
        rig.submit(write(cluster * CLUSTER, 4096, 3, PLAIN)).unwrap();
    }
    assert!(prepared(&changes(&rig)).len() <= 1, "what was wanted before");
}

#[test]
fn a_host_that_is_short_of_space_prepares_nothing() {
    let piece = 64 * CLUSTER;
    for (free, pieces) in [(16 * piece - 1, 0), (16 * piece, 1)] {
        let rig = rig(Config { free_space: Some(free), ..able() });
        for cluster in 0..20 {
            rig.submit(write(cluster * CLUSTER, 4096, 3, FUA)).unwrap();
        }
        assert_eq!(prepared(&changes(&rig)).len(), pieces, "{free} bytes are left");
    }
}

#[test]
fn a_storage_that_refuses_is_asked_once_and_costs_what_it_did_without() {
    let without = rig(steady());
    let refusing = rig(Config { prepare_zeroes: Support::FailsOnFirstUse, ..able() });
    let of_writes = |rig: &Rig| {
        for cluster in 0..100 {
            rig.submit(write(cluster * CLUSTER, 4096, 3, FUA)).unwrap();
        }
        changes(rig)
    };
    let (expected, mut found) = (of_writes(&without), of_writes(&refusing));
    assert_eq!(prepared(&found), [64 * CLUSTER], "asked once");
    found.retain(|one| !matches!(one, Operation::PrepareZeroes(_)));
    assert_eq!(found, expected);
}

#[test]
fn what_fails_to_be_prepared_is_taken_as_without() {
    for errno in [errno::ENOSPC, errno::EIO] {
        let rig = rig(able());
        rig.storage.fail(Fault::nth(0, errno).of(OperationKind::PrepareZeroes));
        for cluster in 0..100 {
            rig.submit(write(cluster * CLUSTER, 4096, 3, FUA)).unwrap();
        }
        let tries = prepared(&changes(&rig)).len();
        assert_eq!(tries, 2, "not at once again, and not never");
        for cluster in 0..100 {
            let mut expected = vec![0; CLUSTER as usize];
            expected[..4096].fill(3);
            assert_eq!(rig.read(cluster * CLUSTER, CLUSTER as usize), expected);
        }
    }
}

/// Clusters of the file after the last one that refcounts count, found by opening it anew.
fn opened_again(image: Vec<u8>) -> (Sim, SimDisk) {
    let sim = Sim::new(5);
    let storage = SimDisk::new(&sim, able(), image);
    let opened = storage.clone();
    sim.block_on(async move {
        let image = Qcow2::open(opened, qcow2::OpenOptions::default()).await.expect("an image");
        let report = qcow2::check(&image).await.expect("a check");
        assert_eq!((report.corruptions, report.leaks), (0, 0), "{:?}", report.problems);
    });
    (sim, storage)
}

#[test]
fn what_is_left_is_given_back_at_the_end() {
    let rig = rig(able());
    rig.submit(write(0, 4096, 3, FUA)).unwrap();
    let disk = rig.disk.clone();
    rig.sim.block_on(async move { disk.close().await }).unwrap();
    assert!(rig.storage.size() < 16 * CLUSTER, "{} bytes", rig.storage.size());
    opened_again(rig.storage.content());
}

#[test]
fn what_a_crash_left_is_no_leak_and_is_used_and_given_back() {
    let rig = rig(able());
    rig.submit(write(0, 4096, 3, FUA)).unwrap();
    let length = rig.storage.size();
    assert!(length > 64 * CLUSTER);
    for seed in 0..20 {
        let (sim, storage) = opened_again(rig.storage.crash(&mut Rng::with_seed(seed)));
        assert_eq!(storage.size(), length, "its length is durable");
        let opened = storage.clone();
        let options = Options::default();
        sim.block_on(async move {
            let disk = Disk::open(opened.clone(), ImageFormat::Qcow2, options).await.unwrap();
            for cluster in 1..41 {
                disk.submit(write(cluster * CLUSTER, 4096, 5, FUA)).await.unwrap();
            }
            assert_eq!(opened.size(), length, "the space that was left is used");
            disk.close().await.unwrap();
        });
        assert!(storage.size() < 56 * CLUSTER, "{} bytes", storage.size());
        opened_again(storage.content());
    }
}

/// Clusters of the images that crash, and their size.
const SMALL: u64 = 4096;
const CLUSTERS: u64 = 60;
const SECTOR: u64 = 512;
const SECTORS: u64 = SMALL / SECTOR;
const UNWRITTEN: &str = "a cluster that nobody wrote to";

/// Sectors that durable writes were begun to, and those that were answered.
#[derive(Default)]
struct Written {
    begun: BTreeSet<u64>,
    answered: BTreeSet<u64>,
}

/// Which clusters each guest writes to, and how.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Guests {
    /// To any, one sector of each durably.
    Scattered,
    /// From each to the next one, so that others are mapped ahead; a flush follows some writes
    /// instead.
    Runs,
    /// The same, all of each cluster.
    WholeRuns,
}

/// Several guests write to clusters of an empty image, which crashes at every point.
///
/// # Errors
/// In words, what an image that was left must not be.
fn crash_everywhere(
    seed: u64,
    guests: Guests,
    wrap: impl FnOnce(SimDisk) -> SimDisk,
) -> Result<(), String> {
    let (sim, mut random) = (Sim::new(seed), Rng::with_seed(seed));
    let latency = Latency { data: 1..=100, flush: 1..=300 };
    let storage = SimDisk::new(&sim, Config { latency, ..able() }, Vec::new());
    let target = storage.clone();
    sim.block_on(async move {
        let options = CreateOptions { cluster_size: SMALL, ..CreateOptions::new(CLUSTERS * SMALL) };
        qcow2::create(&target, &options).await.expect("a new image");
    });
    let opened = wrap(storage.clone());
    let disk = sim.block_on(async move {
        Disk::open(opened, ImageFormat::Qcow2, Options::default()).await.expect("the new image")
    });
    let (disk, written) = (Rc::new(disk), Rc::new(RefCell::new(Written::default())));
    let mut clusters: Vec<u64> = (0..CLUSTERS).collect();
    if guests == Guests::Scattered {
        random.shuffle(&mut clusters);
    }
    for part in clusters[..24].chunks(24 / random.usize(1..=3)) {
        let (disk, written) = (Rc::clone(&disk), Rc::clone(&written));
        let mut random = random.fork();
        let writes: Vec<Range<u64>> = part
            .iter()
            .map(|cluster| {
                let first = cluster * SECTORS;
                let one = first + random.u64(..SECTORS);
                if guests == Guests::WholeRuns { first..first + SECTORS } else { one..one + 1 }
            })
            .collect();
        sim.spawn(async move {
            for sectors in writes {
                written.borrow_mut().begun.extend(sectors.clone());
                let is_durable = guests == Guests::Scattered || random.u8(..4) > 0;
                let durability = if is_durable { FUA } else { PLAIN };
                let length = (sectors.end - sectors.start) * SECTOR;
                let change = write(sectors.start * SECTOR, length as usize, 7, durability);
                disk.submit(change).await.expect("no failure");
                if !is_durable {
                    disk.submit(Request::Flush).await.expect("no failure");
                }
                written.borrow_mut().answered.extend(sectors);
            }
        });
    }
    let mut counts = storage.counts();
    while sim.step() {
        if counts != storage.counts() {
            counts = storage.counts();
            check_image(storage.crash(&mut random), &written.borrow())?;
        }
    }
    assert!(written.borrow().answered.len() >= 24, "all were answered");
    Ok(())
}

fn check_image(image: Vec<u8>, written: &Written) -> Result<(), String> {
    let sim = Sim::new(0);
    let storage = SimDisk::new(&sim, plain_config(), image);
    let bytes = sim.block_on(async move {
        let image = Qcow2::open(storage.clone(), qcow2::OpenOptions::default()).await;
        let report = qcow2::check(&image.map_err(|error| error.to_string())?).await;
        let report = report.map_err(|error| error.to_string())?;
        if report.corruptions > 0 {
            return Err(format!("{:?}", report.problems));
        }
        let disk = Disk::open(storage, ImageFormat::Qcow2, Options::default()).await;
        read_all(&disk.map_err(|error| error.to_string())?).await
    })?;
    for (sector, bytes) in (0..).zip(bytes.chunks(SECTOR as usize)) {
        let is_allowed = |byte: u8| bytes.iter().all(|&found| found == byte);
        let (is_begun, is_answered) =
            (written.begun.contains(&sector), written.answered.contains(&sector));
        if !(is_allowed(7) && is_begun || is_allowed(0) && !is_answered) {
            let first = sector / SECTORS * SECTORS;
            let is_used = written.begun.range(first..first + SECTORS).next().is_some();
            let whose = if is_used { "a cluster in use" } else { UNWRITTEN };
            return Err(format!("sector {sector} of {whose} holds {:?}", &bytes[..4]));
        }
    }
    Ok(())
}

#[test]
fn no_crash_shows_what_was_in_prepared_space_before() {
    for guests in [Guests::Scattered, Guests::Runs, Guests::WholeRuns] {
        for seed in 0..12 {
            assert_eq!(crash_everywhere(seed, guests, |disk| disk), Ok(()), "seed {seed}");
        }
    }
}

#[test]
fn space_that_counts_as_prepared_too_early_is_found_out() {
    let early = |disk| SimDisk::wrapping(Broken::new(disk, Policy::PreparedEarly));
    let found = (0..40).find_map(|seed| crash_everywhere(seed, Guests::Scattered, early).err());
    eprintln!("{:?}", found.expect("it went unnoticed"));
    // Clusters that are mapped ahead to such space show it without being written.
    let found = (0..80).find_map(|seed| {
        let violation = crash_everywhere(seed, Guests::WholeRuns, early).err()?;
        violation.contains(UNWRITTEN).then_some(violation)
    });
    eprintln!("{:?}", found.expect("it went unnoticed"));
}

/// Makes the disk longer and takes the space of what is added; bytes that were prepared, and bytes
/// that were sent.
fn lengthen(rig: &Rig, from: u64, to: u64) -> (u64, u64) {
    let done = take(rig, from, to, SpaceMode::Full).expect("room");
    (prepared(&done).iter().sum(), sent(&done))
}

/// Bytes of whole clusters that were sent.
fn sent(done: &[Operation]) -> u64 {
    let length = |one: &Operation| match one {
        Operation::Write(range, _) if range.length() >= CLUSTER => Some(range.length()),
        _ => None,
    };
    done.iter().filter_map(length).sum()
}

/// Makes the disk longer and takes the space of what is added: what was done.
fn take(rig: &Rig, from: u64, to: u64, mode: SpaceMode) -> Result<Vec<Operation>> {
    let disk = Rc::clone(&rig.disk);
    let outcome = rig.sim.block_on(async move {
        disk.resize(to).await?;
        let added = ByteRange::between(from, to);
        take_space(&disk, added, mode, &ToolProgress::default()).await?;
        disk.flush().await
    });
    outcome.map(|()| changes(rig))
}

#[test]
fn a_longer_disk_takes_its_space_without_sending_zeros_where_that_can_be() {
    let added = 36 * CLUSTER;
    for support in [Support::Yes, Support::FailsOnFirstUse, Support::No] {
        let config = Config { prepare_zeroes: support, ..able() };
        let (from, to) = (4 * CLUSTER, 40 * CLUSTER);
        let raw = Rig::new(config.clone(), from as usize, Options::default());
        let qcow2 = Rig::qcow2(config, CreateOptions::new(from));
        for rig in [raw, qcow2] {
            let (prepared, sent) = lengthen(&rig, from, to);
            match support {
                // Besides, places of new tables are filled.
                Support::Yes => assert!(prepared == added && sent <= 2 * CLUSTER, "{sent}"),
                Support::FailsOnFirstUse | Support::No => assert!(sent >= added, "{support:?}"),
            }
            assert_eq!(rig.read(from, added as usize), vec![0; added as usize]);
            rig.log();
            rig.submit(write(from + CLUSTER, 4096, 3, FUA)).unwrap();
            assert!(matches!(changes(&rig)[..], [Operation::Write(_, FUA)]), "it is mapped");
        }
    }
}

/// Of a disk that ends inside an unallocated cluster, only the rest of that cluster is sent.
#[test]
fn a_longer_disk_sends_no_more_than_parts_of_clusters() {
    let config = Config { prepare_zeroes: Support::Yes, ..able() };
    let (from, to) = (4 * CLUSTER + 512, 40 * CLUSTER + 1024);
    let rig = Rig::qcow2(config, CreateOptions::new(from));
    let (prepared, sent) = lengthen(&rig, from, to);
    assert!(prepared >= 35 * CLUSTER && sent <= 4 * CLUSTER, "{prepared} {sent}");
    assert_eq!(rig.read(from, (to - from) as usize), vec![0; (to - from) as usize]);
}

#[test]
fn a_longer_disk_has_its_space_set_aside_where_that_can_be() {
    has_its_space_at_once(SpaceMode::Falloc, Unmap::Forbidden);
}

#[test]
fn a_longer_disk_has_its_tables_at_once_and_holes_where_that_can_be() {
    has_its_space_at_once(SpaceMode::Tables, Unmap::Allowed);
}

fn has_its_space_at_once(mode: SpaceMode, unmap: Unmap) {
    // Neither the first byte nor the last is a cluster's.
    let (from, to) = (4 * CLUSTER + 512, 40 * CLUSTER + 1024);
    for support in [Support::Yes, Support::FailsOnFirstUse, Support::No] {
        let config = Config { write_zeroes: support, ..able() };
        let raw = Rig::new(config.clone(), from as usize, Options::default());
        let qcow2 = Rig::qcow2(config, CreateOptions::new(from));
        let rigs = if mode == SpaceMode::Tables { vec![qcow2] } else { vec![raw, qcow2] };
        for rig in rigs {
            rig.submit(write(from - 512, 512, 9, PLAIN)).unwrap();
            rig.log();
            let done = match (take(&rig, from, to, mode), support) {
                (Ok(done), Support::Yes) => done,
                (Err(error), Support::No | Support::FailsOnFirstUse) => {
                    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
                    continue;
                }
                (outcome, _) => panic!("{support:?}: {outcome:?}"),
            };
            let zeroed = done.iter().filter_map(|one| match one {
                Operation::WriteZeroes(range, how) if *how == unmap => Some(range.length()),
                _ => None,
            });
            assert!(zeroed.sum::<u64>() >= 35 * CLUSTER && sent(&done) <= 4 * CLUSTER, "{done:?}");
            assert_eq!(rig.read(from, (to - from) as usize), vec![0; (to - from) as usize]);
            assert_eq!(rig.read(from - 512, 512), [9; 512]);
            rig.log();
            rig.submit(write(8 * CLUSTER, 4096, 3, FUA)).unwrap();
            assert!(matches!(changes(&rig)[..], [Operation::Write(_, FUA)]), "it is mapped");
        }
    }
}
