//! The cost of recording changes in a bitmap, counted in storage operations; and the bitmap after
//! the process dies.

use std::rc::Rc;

use std::sync::Arc;

use blockhouse_core::{ByteRange, Durability, Request, errno};
use blockhouse_disk::{BitmapAction, BitmapLoss, Disk, ImageFormat, NewBitmap, Options};
use blockhouse_format::qcow2::{self, CreateOptions, OpenOptions, Qcow2};
use blockhouse_sim::{Config, Fault, Operation, OperationKind, Rng, Sim, SimDisk};
use parking_lot::Mutex;

use crate::common::{Rig, discard, steady, write, zeroes};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 64 * MIB;
const FUA: Durability = Durability::Data;
const PLAIN: Durability = Durability::None;

/// A disk of which all is mapped, with an enabled bitmap in which nothing is recorded.
fn rig() -> Rig {
    let rig = Rig::qcow2_with_room(steady(), CreateOptions::new(SIZE), 2 * SIZE);
    for offset in (0..SIZE).step_by(4 << 20) {
        rig.submit(write(offset, 4 << 20, 1, PLAIN)).unwrap();
    }
    rig.submit(Request::Flush).unwrap();
    add(&rig, "changes");
    rig.log();
    rig
}

fn run<T: 'static>(rig: &Rig, use_of: impl AsyncFnOnce(&Disk<SimDisk>) -> T + 'static) -> T {
    let disk = Rc::clone(&rig.disk);
    rig.sim.block_on(async move { use_of(&disk).await })
}

fn add(rig: &Rig, name: &'static str) {
    run(rig, async move |disk: &Disk<SimDisk>| {
        let new = NewBitmap { name: name.to_owned(), granularity: None, is_enabled: true };
        disk.bitmaps().add(&new).await.unwrap();
    });
}

/// Extents of 64 KiB that the bitmap has.
fn dirty(rig: &Rig, name: &'static str) -> Vec<u64> {
    run(rig, async move |disk: &Disk<SimDisk>| {
        let all = ByteRange::between(0, SIZE);
        let extents = disk.bitmaps().extents(name, all, usize::MAX).await.unwrap();
        let mut at = 0;
        let mut dirty = Vec::new();
        for extent in extents {
            if extent.is_dirty {
                dirty.extend(at / 65_536..(at + extent.length) / 65_536);
            }
            at += extent.length;
        }
        dirty
    })
}

/// All operations but reads.
fn changes(rig: &Rig) -> Vec<Operation> {
    rig.log().into_iter().filter(|operation| !matches!(operation, Operation::Read(_))).collect()
}

/// Durable writes, other writes, flushes.
fn count(changes: &[Operation]) -> [usize; 3] {
    let count = |wanted: fn(&Operation) -> bool| changes.iter().filter(|one| wanted(one)).count();
    [
        count(|one| matches!(one, Operation::Write(_, FUA))),
        count(|one| matches!(one, Operation::Write(_, PLAIN))),
        count(|one| matches!(one, Operation::Flush(_))),
    ]
}

#[test]
fn a_warm_extent_costs_nothing_and_a_cold_one_a_durable_write() {
    let rig = rig();
    rig.submit(write(0, 4096, 2, FUA)).unwrap();
    rig.log();
    for number in 0..20 {
        rig.submit(write(number * 65_536 + 8192, 4096, 2, FUA)).unwrap();
    }
    assert_eq!(count(&changes(&rig)), [20, 0, 0], "warm");
    for extent in 1..16 {
        rig.submit(write(extent * 4 * MIB, 4096, 2, FUA)).unwrap();
        let [bits, data] = changes(&rig)[..] else { panic!("more than two operations") };
        assert!(
            matches!(bits, Operation::Write(range, FUA) if range.length() == 4096),
            "bits go before the data: {bits:?}"
        );
        assert!(matches!(data, Operation::Write(range, FUA) if range.length() == 4096));
    }
    add(&rig, "second");
    rig.submit(write(0, 4096, 2, FUA)).unwrap();
    rig.log();
    rig.submit(write(MIB, 4096, 2, FUA)).unwrap();
    assert_eq!(count(&changes(&rig)), [1, 0, 0], "warm in both");
    rig.submit(write(9 * MIB, 4096, 2, FUA)).unwrap();
    assert_eq!(count(&changes(&rig)), [3, 0, 0], "cold in both");
}

#[test]
fn all_kinds_of_changes_are_recorded() {
    let rig = rig();
    rig.submit(write(65_536, 1, 2, PLAIN)).unwrap();
    rig.submit(zeroes(2 * 65_536 + 512, 512, PLAIN)).unwrap();
    rig.submit(discard(4 * 65_536, 65_536)).unwrap();
    assert_eq!(dirty(&rig, "changes"), [1, 2, 4]);
    run(&rig, async |disk: &Disk<SimDisk>| {
        disk.bitmaps().change("changes", BitmapAction::Clear).await.unwrap();
        disk.bitmaps().change("changes", BitmapAction::Disable).await.unwrap();
    });
    rig.submit(write(0, 1, 2, PLAIN)).unwrap();
    assert!(dirty(&rig, "changes").is_empty());
    run(&rig, async |disk: &Disk<SimDisk>| {
        disk.bitmaps().change("changes", BitmapAction::Enable).await.unwrap();
    });
    rig.submit(write(9 * 65_536 - 1, 2, 2, PLAIN)).unwrap();
    assert_eq!(dirty(&rig, "changes"), [8, 9]);
}

/// Whichever write finds no room when a bitmap gets its first bit: it lacks no change, now and
/// after the process has died. Where there was no room for the bits themselves, more counts as
/// changed, which is reported once.
#[test]
fn a_bitmap_without_room_becomes_coarser_and_lacks_nothing() {
    let (mut coarser, mut exact) = (0, 0);
    for n in 0.. {
        let rig = rig();
        let told = Arc::new(Mutex::new(Vec::new()));
        let observed = Arc::clone(&told);
        rig.disk.observe_bitmap_losses(Arc::new(move |name: &str, loss, _: &_| {
            observed.lock().push((name.to_owned(), loss));
        }));
        rig.storage.fail(Fault::nth(n, errno::ENOSPC).of(OperationKind::Write));
        let outcome = rig.submit(write(5 * 65_536, 4096, 2, FUA));
        if !rig.storage.has_failed() {
            break;
        }
        // The header and the guest's own bytes are not the bitmap's to lose.
        if outcome.is_err() {
            continue;
        }
        rig.submit(write(9 * 65_536, 4096, 2, FUA)).unwrap();
        let told = std::mem::take(&mut *told.lock());
        let content = rig.storage.content();
        let sim = Sim::new(2);
        let storage = SimDisk::new(&sim, steady(), content);
        let disk =
            sim.block_on(Disk::open(storage.clone(), ImageFormat::Qcow2, Options::default()));
        let later = Rig { sim, storage, disk: Rc::new(disk.unwrap()) };
        match &told[..] {
            [] => exact += 1,
            [(name, BitmapLoss::Precision)] => {
                assert_eq!(name, "changes");
                assert_eq!(dirty(&later, "changes").len() as u64, SIZE / 65_536);
                coarser += 1;
            }
            _ => panic!("write {n}: {told:?}"),
        }
        for found in [dirty(&rig, "changes"), dirty(&later, "changes")] {
            assert!(found.contains(&5) && found.contains(&9), "write {n}: {found:?}");
        }
    }
    assert!(coarser > 0, "{exact}");
}

/// A disk of which all is mapped, in small clusters, and a bitmap of several clusters that has one.
fn rig_of_small_clusters() -> Rig {
    let image = CreateOptions { cluster_size: 512, ..CreateOptions::new(SMALL) };
    let rig = Rig::qcow2_with_room(steady(), image, 2 * SMALL);
    for offset in (0..SMALL).step_by(1 << 20) {
        rig.submit(write(offset, 1 << 20, 1, PLAIN)).unwrap();
    }
    rig.submit(Request::Flush).unwrap();
    run(&rig, async |disk: &Disk<SimDisk>| {
        let granularity = Some(512);
        let new = NewBitmap { name: "changes".to_owned(), granularity, is_enabled: true };
        disk.bitmaps().add(&new).await.unwrap();
    });
    rig.submit(write(FIRST, 512, 2, FUA)).unwrap();
    rig
}

const SMALL: u64 = 8 * MIB;
const FIRST: u64 = 512;
const SECOND: u64 = 5 * MIB;

/// The granularity of the bitmap of a disk that a loss of power has left, if it lacks nothing: then
/// it has what was changed.
fn granularity_after(rig: &Rig, random: &mut Rng) -> Option<u64> {
    let sim = Sim::new(2);
    let storage = rig.storage.after_power_loss(&sim, random);
    let opened = Disk::open(storage.clone(), ImageFormat::Qcow2, Options::default());
    let disk = Rc::new(sim.block_on(opened).unwrap());
    let later = Rig { sim, storage, disk };
    let (is_lost, granularity) = run(&later, async |disk: &Disk<SimDisk>| {
        let listed = disk.bitmaps().list().await.unwrap();
        (listed[0].is_inconsistent, listed[0].granularity)
    });
    if is_lost {
        return None;
    }
    let is_dirty = |offset: u64| {
        run(&later, async move |disk: &Disk<SimDisk>| {
            let range = ByteRange::between(offset, offset + 512);
            disk.bitmaps().extents("changes", range, 1).await.unwrap()[0].is_dirty
        })
    };
    assert!(is_dirty(FIRST));
    assert!(later.read(SECOND, 1) == [1] || is_dirty(SECOND), "a change is missing");
    Some(granularity)
}

/// Whichever write finds no room, and whenever the host dies while the bitmap becomes coarser.
#[test]
fn a_crash_while_a_bitmap_becomes_coarser_loses_no_change_in_silence() {
    let (mut coarser, mut lost, mut crashes) = (0, 0, 0);
    for n in 0.. {
        let rig = rig_of_small_clusters();
        rig.storage.fail(Fault::nth(n, errno::ENOSPC).of(OperationKind::Write));
        let mut random = Rng::with_seed(n);
        let written = rig.start(write(SECOND, 512, 2, FUA));
        let outcome = loop {
            match written.output() {
                Some(outcome) => break outcome,
                None => rig.wait(3),
            }
            crashes += 1;
            lost += u32::from(granularity_after(&rig, &mut random).is_none());
        };
        if !rig.storage.has_failed() {
            break;
        }
        if outcome.is_ok() {
            let granularity = granularity_after(&rig, &mut random).expect("it lacks nothing");
            coarser += u32::from(granularity > 512);
        }
    }
    eprintln!(
        "{crashes} crashes, {lost} left a bitmap that lacks changes, {coarser} became coarser"
    );
    assert!(coarser > 0 && lost < crashes / 2);
}

/// A bitmap is added while the disk grows and the guest writes, in the order that `seed` decides.
fn a_first_bitmap_beside_a_resize(seed: u64) {
    let rig = Rig::qcow2_by(seed, Config::default(), CreateOptions::new(SIZE));
    let disk = Rc::clone(&rig.disk);
    let added = rig.sim.spawn(async move {
        let new = NewBitmap { name: "changes".to_owned(), granularity: None, is_enabled: true };
        disk.bitmaps().add(&new).await.unwrap();
    });
    let disk = Rc::clone(&rig.disk);
    let resized = rig.sim.spawn(async move { disk.resize(SIZE + MIB).await.unwrap() });
    let mut recorded = Vec::new();
    let mut is_added = false;
    for number in 0..24 {
        is_added |= added.output().is_some();
        if is_added {
            recorded.push(number * 16);
        }
        drop(rig.start(write(number * MIB, 4096, 2, PLAIN)));
        rig.wait(97);
    }
    rig.sim.run();
    assert!(is_added || added.output().is_some(), "seed {seed}: the bitmap waits for ever");
    assert!(resized.output().is_some(), "seed {seed}: the resize waits for ever");
    let found = dirty(&rig, "changes");
    assert!(
        recorded.iter().all(|extent| found.contains(extent)),
        "seed {seed}: {recorded:?} not in {found:?}"
    );
    let storage = rig.storage.clone();
    run(&rig, async move |disk: &Disk<SimDisk>| {
        disk.close().await.unwrap();
        let image = Qcow2::open(storage, OpenOptions::default()).await.unwrap();
        let report = qcow2::check(&image).await.unwrap();
        assert_eq!(report.corruptions + report.leaks, 0, "seed {seed}: {:?}", report.problems);
    });
}

#[test]
fn a_first_bitmap_is_added_before_or_after_a_resize() {
    for seed in 0..200 {
        a_first_bitmap_beside_a_resize(seed);
    }
}
