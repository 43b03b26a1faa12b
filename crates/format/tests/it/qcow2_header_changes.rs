//! Changes of names in the header, beside other changes, and a failed flush of a header.

use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use blockhouse_core::{Alignment, ByteRange, Durability, ErrorKind, SyncMode, ToolProgress, errno};
use blockhouse_format::Intent;
use blockhouse_format::qcow2::{
    Backing, CreateOptions, DataFile, NewBitmap, OpenOptions, Qcow2, Switch, Voucher, create_with,
};
use blockhouse_sim::{Config, Fault, OperationKind, Report, Sim, SimDisk, for_seeds};
use futures_util::future::{Either, select};

const CLUSTER: u64 = 65_536;
/// Where the header has its autoclear bits.
const AUTOCLEAR: std::ops::Range<usize> = 88..96;
/// Of a feature that no program has yet.
const UNKNOWN_BIT: u8 = 0x40;

fn named(name: &[u8]) -> Backing {
    Backing { name: name.to_vec(), format: Some("raw".into()) }
}

/// A new image, and its data file if it has one.
fn new_image(sim: &Sim, options: CreateOptions) -> Vec<u8> {
    let disk = SimDisk::new(sim, Config::default(), Vec::new());
    let data = SimDisk::new(sim, Config::default(), Vec::new());
    let made = disk.clone();
    sim.block_on(async move {
        let data = options.data_file.as_ref().map(|_| &data);
        create_with(&made, data, &options, &ToolProgress::default()).await.unwrap();
    });
    disk.content()
}

#[test]
fn another_name_clears_autoclear_bits_of_unknown_features() {
    let data_file = Some(DataFile { name: b"data".to_vec(), raw: Switch::Off });
    for data_file in [None, data_file] {
        let sim = Sim::new(1);
        let has_data_file = data_file.is_some();
        let mut bytes = new_image(&sim, CreateOptions { data_file, ..CreateOptions::new(1 << 20) });
        bytes[AUTOCLEAR.start] = UNKNOWN_BIT;
        let disk = SimDisk::new(&sim, Config::default(), bytes);
        let used = disk.clone();
        sim.block_on(async move {
            let image = Qcow2::open(used, OpenOptions::default()).await.unwrap();
            if has_data_file {
                image.header().rename_data_file(b"other").await.unwrap();
            } else {
                image.header().set_backing(Some(named(b"base"))).await.unwrap();
            }
        });
        assert_eq!(disk.content()[AUTOCLEAR], [0; 8], "a data file: {has_data_file}");
    }
}

#[test]
fn another_name_clears_them_also_after_a_change_that_could_not() {
    for seed in 0..20 {
        let sim = Sim::new(seed);
        let mut bytes = new_image(&sim, CreateOptions::new(1 << 20));
        bytes[AUTOCLEAR.start] = UNKNOWN_BIT;
        let disk = SimDisk::new(&sim, Config::default(), bytes);
        let used = disk.clone();
        sim.block_on(async move {
            let image = Qcow2::open(used.clone(), OpenOptions::default()).await.unwrap();
            used.fail(Fault::nth(0, errno::EIO).of(OperationKind::Write));
            let failed = image.map(ByteRange::between(0, CLUSTER), Intent::Write).await;
            assert_eq!(failed.expect_err("a header write failed").kind(), ErrorKind::Io);
            used.clear_faults();
            image.header().set_backing(Some(named(b"base"))).await.unwrap();
        });
        assert_eq!(disk.content()[AUTOCLEAR], [0; 8], "seed {seed}");
    }
}

/// Fails `count` writes after the first `n`. The new name of a backing file is beyond the first
/// sector, so the second write changes the fields.
fn fail_names(disk: &SimDisk, n: u64, count: u64) {
    for n in n..n + count {
        disk.fail(Fault::nth(n, errno::EIO).of(OperationKind::Write));
    }
}

/// Whether the failed write of the header got to the disk is not known: the old name is written
/// again.
#[test]
fn the_old_name_stays_after_another_one_that_could_not() {
    let data_file = Some(DataFile { name: b"data".to_vec(), raw: Switch::Off });
    for (seed, data_file) in (0..20).flat_map(|seed| [(seed, None), (seed, data_file.clone())]) {
        let sim = Sim::new(seed);
        let has_data_file = data_file.is_some();
        let options = CreateOptions { data_file, ..CreateOptions::new(1 << 20) };
        let before = new_image(&sim, options);
        let disk = SimDisk::new(&sim, Config::default(), before.clone());
        let used = disk.clone();
        sim.block_on(async move {
            let image = Qcow2::open(used.clone(), OpenOptions::default()).await.unwrap();
            fail_names(&used, if has_data_file { 0 } else { 1 }, 1);
            let failed = match has_data_file {
                true => image.header().rename_data_file(b"other").await,
                false => image.header().set_backing(Some(named(b"base"))).await,
            };
            assert_eq!(failed.expect_err("a header write failed").kind(), ErrorKind::Io);
        });
        for left in [disk.content(), disk.crash(&mut sim.fork_prng())] {
            assert!(left[..512] == before[..512], "seed {seed}, a data file: {has_data_file}");
        }
    }
}

/// The extensions, too, are written again by the next write of the header.
#[test]
fn a_voucher_is_on_the_disk_once_its_renewal_succeeds() {
    static UNTIL: AtomicU64 = AtomicU64::new(0);
    let vouch = || Some(Voucher { boot: [1; 16], until: UNTIL.load(Relaxed) });
    let vouched = |seed, errno: Option<i32>| {
        let sim = Sim::new(seed);
        let disk = SimDisk::new(&sim, Config::default(), Vec::new());
        let data = SimDisk::new(&sim, Config::default(), Vec::new());
        let used = disk.clone();
        sim.block_on(async move {
            let data_file = Some(DataFile { name: b"data".to_vec(), raw: Switch::On });
            let identity = Some([7; 16]);
            let options = CreateOptions { data_file, identity, ..CreateOptions::new(1 << 20) };
            create_with(&used, Some(&data), &options, &ToolProgress::default()).await.unwrap();
            let image = Qcow2::open(used.clone(), OpenOptions::default()).await.unwrap();
            let image = image.with_data(data).unwrap();
            let new = NewBitmap { name: "changes".into(), granularity: None, is_enabled: true };
            image.bitmaps().add(&new).await.unwrap();
            UNTIL.store(5, Relaxed);
            image.bitmaps().vouch_by(vouch);
            image.bitmaps().record(ByteRange::between(0, CLUSTER)).await.unwrap();
            UNTIL.store(9, Relaxed);
            if let Some(errno) = errno {
                used.fail(Fault::nth(0, errno).of(OperationKind::Write));
                image.bitmaps().renew_voucher().await.expect_err("its write failed");
            }
            image.bitmaps().renew_voucher().await.unwrap();
        });
        disk.crash(&mut sim.fork_prng())[..512].to_vec()
    };
    for seed in 0..20 {
        assert!(vouched(seed, Some(errno::EIO)) == vouched(seed, None), "seed {seed}");
    }
}

#[test]
fn no_flush_succeeds_after_the_failed_flush_of_a_voucher() {
    let sim = Sim::new(1);
    let disk = SimDisk::new(&sim, Config::default(), Vec::new());
    let data = SimDisk::new(&sim, Config::default(), Vec::new());
    sim.block_on(async move {
        let data_file = Some(DataFile { name: b"data".to_vec(), raw: Switch::On });
        let identity = Some([7; 16]);
        let options = CreateOptions { data_file, identity, ..CreateOptions::new(1 << 20) };
        create_with(&disk, Some(&data), &options, &ToolProgress::default()).await.unwrap();
        let image = Qcow2::open(disk.clone(), OpenOptions::default()).await.unwrap();
        let image = image.with_data(data).unwrap();
        let new = NewBitmap { name: "changes".into(), granularity: None, is_enabled: true };
        image.bitmaps().add(&new).await.unwrap();
        image.bitmaps().vouch_by(|| Some(Voucher { boot: [1; 16], until: 5 }));
        image.bitmaps().record(ByteRange::between(0, CLUSTER)).await.unwrap();
        disk.fail(Fault::nth(0, errno::EIO).of(OperationKind::Flush));
        let error = image.bitmaps().renew_voucher().await.expect_err("its flush failed");
        assert_eq!(error.kind(), ErrorKind::Io);
        disk.clear_faults();
        let error = image.flush(SyncMode::Data).await.expect_err("data may be lost");
        assert_eq!(error.kind(), ErrorKind::Io);
    });
}

/// A block of the storage holds more than the sector with the header's fields.
#[test]
fn a_new_name_and_another_change_of_the_header_both_get_there() {
    let test = "a_new_name_and_another_change_of_the_header_both_get_there";
    for_seeds(env!("CARGO_PKG_NAME"), test, 1000, |seed| {
        let sim = Sim::new(seed);
        let mut random = sim.fork_prng();
        let lazy_refcounts = Switch::On;
        let bytes =
            new_image(&sim, CreateOptions { lazy_refcounts, ..CreateOptions::new(1 << 20) });
        let alignment = Alignment { offset: 4096, memory: 1 };
        let disk = SimDisk::new(&sim, Config { alignment, ..Config::default() }, bytes);
        let opened = disk.clone();
        let image = sim.block_on(async move { Qcow2::open(opened, OpenOptions::default()).await });
        let image = Rc::new(image.map_err(|error| error.to_string())?);
        let renamed = Rc::clone(&image);
        let name = sim
            .spawn(async move { renamed.header().set_backing(Some(named(&[b'n'; 1000]))).await });
        let (clock, delay) = (sim.clone(), random.u64(..2000));
        let used = Rc::clone(&image);
        // The first durable change sets the dirty bit.
        let change = sim.spawn(async move {
            clock.sleep(Duration::from_micros(delay)).await;
            let extent = used.map(ByteRange::between(0, CLUSTER), Intent::Write).await?;
            used.link(extent, Durability::None).await?;
            used.flush(SyncMode::Data).await
        });
        sim.run();
        for task in [name, change] {
            let outcome = task.output().ok_or("it never ends")?;
            outcome.map_err(|error| error.to_string())?;
        }
        let left = disk.crash(&mut random);
        if left[79] & 1 == 0 {
            return Err("the dirty bit is lost".into());
        }
        let at = u64::from_be_bytes(left[8..16].try_into().unwrap()) as usize;
        if left[at..at + 1000] != [b'n'; 1000] {
            return Err("the name is lost".into());
        }
        Ok(Report::default())
    });
}

/// Whether a sector has the names of another one.
fn has_names_of(sector: &[u8], other: &[u8]) -> bool {
    sector[8..20] == other[8..20] && sector[112..512] == other[112..512]
}

/// Neither the new name nor, after that, the old one could be written.
#[test]
fn the_old_name_is_stored_by_later_writes_of_the_header() {
    let mut replaced = 0;
    for (seed, is_used) in (0..20).flat_map(|seed| [(seed, false), (seed, true)]) {
        let sim = Sim::new(seed);
        let before = new_image(&sim, CreateOptions::new(1 << 20));
        let disk = SimDisk::new(&sim, Config::default(), before.clone());
        let (used, old) = (disk.clone(), before.clone());
        let is_replaced = sim.block_on(async move {
            let image = Qcow2::open(used.clone(), OpenOptions::default()).await.unwrap();
            fail_names(&used, 1, 2);
            let failed = image.header().set_backing(Some(named(b"base"))).await;
            assert_eq!(failed.expect_err("a header write failed").kind(), ErrorKind::Io);
            let is_replaced = !has_names_of(&used.content(), &old);
            if is_used {
                let extent =
                    image.map(ByteRange::between(0, CLUSTER), Intent::Write).await.unwrap();
                image.link(extent, Durability::None).await.unwrap();
                image.flush(SyncMode::Data).await.unwrap();
            } else {
                image.close().await.unwrap();
            }
            is_replaced
        });
        replaced += u32::from(is_replaced);
        for left in [disk.content(), disk.crash(&mut sim.fork_prng())] {
            assert!(has_names_of(&left, &before), "seed {seed}, used: {is_used}");
        }
    }
    assert!(replaced > 0, "no failed write got to the disk");
}

#[test]
fn a_new_name_may_follow_one_that_could_not_be_undone() {
    for seed in 0..20 {
        let sim = Sim::new(seed);
        let before = new_image(&sim, CreateOptions::new(1 << 20));
        let disk = SimDisk::new(&sim, Config::default(), before);
        let used = disk.clone();
        sim.block_on(async move {
            let image = Qcow2::open(used.clone(), OpenOptions::default()).await.unwrap();
            fail_names(&used, 1, 2);
            image.header().set_backing(Some(named(b"base"))).await.expect_err("it cannot");
            image.header().set_backing(Some(named(b"other"))).await.unwrap();
            image.close().await.unwrap();
            let opened = Qcow2::open(used, OpenOptions::default()).await.unwrap();
            assert_eq!(opened.facts().backing, Some(named(b"other")), "seed {seed}");
        });
    }
}

#[test]
fn a_change_of_names_that_is_dropped_leaves_the_old_one() {
    let mut dropped = 0;
    for seed in 0..100 {
        let sim = Sim::new(seed);
        let delay = Duration::from_micros(sim.fork_prng().u64(..3000));
        let before = new_image(&sim, CreateOptions::new(1 << 20));
        let disk = SimDisk::new(&sim, Config::default(), before.clone());
        let (used, clock) = (disk.clone(), sim.clone());
        let is_done = sim.block_on(async move {
            let image = Qcow2::open(used, OpenOptions::default()).await.unwrap();
            let is_done = {
                let header = image.header();
                let change = pin!(header.set_backing(Some(named(b"base"))));
                matches!(select(change, pin!(clock.sleep(delay))).await, Either::Left(_))
            };
            image.close().await.unwrap();
            is_done
        });
        dropped += u32::from(!is_done);
        assert_eq!(has_names_of(&disk.content(), &before), !is_done, "seed {seed}, {delay:?}");
    }
    assert!((1..100).contains(&dropped), "{dropped} of 100");
}
