//! Snapshots on a simulated disk: random trees of them against a flat model, judged by our check
//! and by QEMU's tools; crashes after every operation; a failure of every operation.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use blockhouse_core::{Alignment, ByteRange, ErrorKind, Fua, Result, SyncMode, Unmap, errno};
use blockhouse_format::Intent;
use blockhouse_format::qcow2::{
    Access, Backing, CheckReport, CreateOptions, NewSnapshot, OpenOptions, Preparation, Qcow2,
    SnapshotPlan, Switch, Version, check, create,
};
use blockhouse_sim::{Config, Fault, Report, Rng, Sim, SimDisk, Size, for_seeds};

use crate::common::{has_qemu, qemu_check, read, run, unmap, write};

/// The content of each disk: the active one, and the snapshots by name.
#[derive(Clone, Default, PartialEq, Eq)]
struct Model {
    active: Vec<u8>,
    snapshots: BTreeMap<String, Vec<u8>>,
}

fn plain() -> Config {
    Config { alignment: Alignment::BYTE, fua: Fua::Emulated, ..Config::default() }
}

fn new(name: &str) -> NewSnapshot {
    let created = Duration::new(1_700_000_000, 1);
    NewSnapshot { name: name.into(), created, vm_clock: Duration::ZERO }
}

fn create_options(random: &mut Rng) -> CreateOptions {
    let cluster_size = [512, 1024, 4096, 16_384][random.usize(..4)];
    let is_v2 = random.u8(..4) == 0;
    let switch = |on| if on { Switch::On } else { Switch::Off };
    CreateOptions {
        cluster_size,
        version: if is_v2 { Version::V2 } else { Version::V3 },
        refcount_bits: if is_v2 { 16 } else { [8, 16, 64][random.usize(..3)] },
        lazy_refcounts: switch(!is_v2 && random.u8(..4) == 0),
        extended_l2: switch(!is_v2 && cluster_size == 16_384 && random.bool()),
        backing: (random.u8(..4) == 0)
            .then(|| Backing { name: b"base".to_vec(), format: Some("raw".into()) }),
        ..CreateOptions::new(random.u64(2..=120) * 4096)
    }
}

fn fresh(random: &mut Rng) -> (Sim, SimDisk, CreateOptions) {
    let sim = Sim::new(random.u64(..));
    let disk = SimDisk::new(&sim, plain(), Vec::new());
    let options = create_options(random);
    let (made, how) = (disk.clone(), options.clone());
    sim.block_on(async move { create(&made, &how).await }).expect("a new image");
    (sim, disk, options)
}

async fn open(disk: &SimDisk) -> Qcow2<SimDisk> {
    Qcow2::open(disk.clone(), OpenOptions::default()).await.expect("a good image")
}

async fn all_of(image: &Qcow2<SimDisk>) -> Vec<u8> {
    read(image, ByteRange::between(0, image.size()), 0).await.expect("a good image")
}

/// One random change of the guest's data.
async fn scribble(image: &Qcow2<SimDisk>, model: &mut Model, random: &mut Rng) -> Result<()> {
    let sectors = image.size() / 512;
    let start = random.u64(..sectors);
    let end =
        (start + [random.u64(1..=4), random.u64(1..=sectors)][random.usize(..2)]).min(sectors);
    let range = ByteRange::between(start * 512, end * 512);
    let bytes = &mut model.active[range.offset() as usize..range.end() as usize];
    match random.u8(..6) {
        0 => {
            let intent = Intent::Zero([Unmap::Allowed, Unmap::Forbidden][random.usize(..2)]);
            bytes.fill(0);
            unmap(image, range, intent, 0).await
        }
        1 => {
            // The bytes that a discard leaves are read afterwards.
            unmap(image, range, Intent::Discard, 0).await?;
            let found = read(image, range, 0).await?;
            bytes.copy_from_slice(&found);
            Ok(())
        }
        _ => {
            bytes.fill(random.u8(1..));
            write(image, range.offset(), bytes, 0).await
        }
    }
}

/// How a snapshot is taken or deleted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Taking {
    /// All of it in one transaction.
    AtOnce,
    /// Prepared, and made then: a crash may leave leaks.
    Prepared,
}

async fn take(image: &Qcow2<SimDisk>, name: &str, how: Taking) -> Result<()> {
    change(image, SnapshotPlan::Create(new(name)), how).await
}

async fn delete(image: &Qcow2<SimDisk>, name: &str, how: Taking) -> Result<()> {
    change(image, SnapshotPlan::Delete(name.to_owned()), how).await
}

async fn change(image: &Qcow2<SimDisk>, plan: SnapshotPlan, how: Taking) -> Result<()> {
    if how == Taking::Prepared {
        let outcome = prepare_and_take(image, &plan).await;
        image.snapshots().give_back().await;
        if outcome? == Preparation::Ready {
            return Ok(());
        }
    }
    match plan {
        SnapshotPlan::Create(new) => image.snapshots().create(&new, None).await.map(|_| ()),
        SnapshotPlan::Delete(name) => image.snapshots().delete(&name).await,
    }
}

/// Whether it is made, or has to be made at once.
async fn prepare_and_take(image: &Qcow2<SimDisk>, plan: &SnapshotPlan) -> Result<Preparation> {
    let mut prepared = image.snapshots().prepare(plan.clone()).await?;
    loop {
        if prepared.update(&|| false).await? == Preparation::AtOnce {
            return Ok(Preparation::AtOnce);
        }
        if prepared.take(Duration::ZERO).await?.is_some() {
            prepared.free_unreferenced().await;
            return Ok(Preparation::Ready);
        }
    }
}

/// One random change of the snapshots.
async fn change_snapshots(
    image: &Qcow2<SimDisk>,
    model: &mut Model,
    random: &mut Rng,
    how: Taking,
) -> Result<()> {
    let names: Vec<String> = model.snapshots.keys().cloned().collect();
    let any = |random: &mut Rng| names[random.usize(..names.len())].clone();
    match random.u8(..8) {
        0..4 if names.len() < 6 => {
            let name = format!("s{}", random.u32(..));
            let active = model.active.clone();
            model.snapshots.insert(name.clone(), active);
            take(image, &name, how).await
        }
        _ if names.is_empty() => Ok(()),
        4 => {
            let name = any(random);
            model.active = model.snapshots[&name].clone();
            image.snapshots().apply(&name).await
        }
        5 => {
            let (old, name) = (any(random), format!("r{}", random.u32(..)));
            let content = model.snapshots.remove(&old).expect("it is there");
            model.snapshots.insert(name.clone(), content);
            image.snapshots().rename(&old, &name).await
        }
        _ => {
            let name = any(random);
            model.snapshots.remove(&name);
            delete(image, &name, how).await
        }
    }
}

/// The content of an image, and the report of a check.
fn recover(content: Vec<u8>) -> Result<(Model, CheckReport), String> {
    let sim = Sim::new(0);
    let disk = SimDisk::new(&sim, plain(), content);
    let found = sim.block_on(async move {
        // Opened for writing, so that refcounts that are late are repaired.
        let image = Qcow2::open(disk.clone(), OpenOptions::default()).await?;
        let report = check(&image).await?;
        let mut model = Model { active: all_of(&image).await, ..Model::default() };
        for snapshot in image.snapshots().list().await? {
            let view =
                Qcow2::open_snapshot(disk.clone(), OpenOptions::default(), &snapshot.name).await?;
            model.snapshots.insert(snapshot.name, all_of(&view).await);
        }
        Ok::<_, blockhouse_core::Error>((model, report))
    });
    found.map_err(|error| format!("what was left behind: {error}"))
}

fn same(found: &Model, wanted: &Model) -> Result<(), String> {
    if found.snapshots.keys().ne(wanted.snapshots.keys()) {
        return Err(format!(
            "snapshots {:?} instead of {:?}",
            found.snapshots.keys(),
            wanted.snapshots.keys()
        ));
    }
    let differ = |one: &[u8], other: &[u8]| {
        let place = one.iter().zip(other).position(|(one, other)| one != other);
        place.or((one.len() != other.len()).then_some(one.len()))
    };
    if let Some(at) = differ(&found.active, &wanted.active) {
        return Err(format!("the disk differs at {at}"));
    }
    for (name, content) in &found.snapshots {
        if let Some(at) = differ(content, &wanted.snapshots[name]) {
            return Err(format!("the snapshot {name} differs at {at}"));
        }
    }
    Ok(())
}

/// QEMU finds nothing wrong and reads the same.
fn ask_qemu(content: &[u8], model: &Model) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let image = path("image.qcow2");
    std::fs::write(&image, content).expect("a file");
    std::fs::write(path("base"), []).expect("a file");
    qemu_check(&image);
    let compare = |bytes: &[u8], options: &[&str], image: &str| {
        std::fs::write(path("raw"), bytes).expect("a file");
        let raw = path("raw").display().to_string();
        run("qemu-img", &[&["compare"], options, &[image, &raw]].concat());
    };
    compare(&model.active, &["-f", "qcow2", "-F", "raw"], text(&image));
    for (name, bytes) in &model.snapshots {
        let part = path("part.raw");
        let how = format!("snapshot.name={name}");
        let arguments = ["convert", "-f", "qcow2", "-O", "raw", "-l", &how];
        run("qemu-img", &[&arguments[..], &[text(&image), text(&part)]].concat());
        compare(bytes, &["-f", "raw", "-F", "raw"], text(&part));
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a plain name")
}

fn grow_a_tree(seed: u64) -> Result<Report, String> {
    let mut random = Rng::with_seed(seed);
    let (sim, disk, _) = fresh(&mut random);
    let storage = disk.clone();
    let mut run = random.fork();
    let model = sim.block_on(async move {
        let mut image = open(&storage).await;
        let mut model =
            Model { active: vec![0; image.size() as usize], snapshots: BTreeMap::new() };
        for _ in 0..run.usize(1..=30) {
            match run.u8(..10) {
                0..3 => {
                    let how = [Taking::AtOnce, Taking::Prepared][run.usize(..2)];
                    change_snapshots(&image, &mut model, &mut run, how).await?;
                }
                3 => image.flush(SyncMode::Data).await?,
                4 => {
                    image.close().await?;
                    image = open(&storage).await;
                }
                _ => scribble(&image, &mut model, &mut run).await?,
            }
        }
        image.close().await?;
        Ok::<_, blockhouse_core::Error>(model)
    });
    let model = model.map_err(|error| error.to_string())?;
    let (found, report) = recover(disk.content())?;
    same(&found, &model)?;
    if report.corruptions + report.leaks > 0 {
        return Err(format!("{report:?}"));
    }
    if seed.is_multiple_of(40) && has_qemu() {
        ask_qemu(&disk.content(), &model);
    }
    Ok(Report::default())
}

#[test]
fn random_trees_of_snapshots_hold_what_they_held() {
    let test = "random_trees_of_snapshots_hold_what_they_held";
    for_seeds(env!("CARGO_PKG_NAME"), test, 1200, grow_a_tree);
}

fn taking(seed: u64) -> Taking {
    if seed.is_multiple_of(2) { Taking::AtOnce } else { Taking::Prepared }
}

/// Makes an image with some snapshots, then changes those once while `watch` looks on.
fn change_once(
    seed: u64,
    prepare: impl FnOnce(&SimDisk, &mut Rng),
    watch: impl FnOnce(&Sim, &SimDisk, &mut Rng, &Model, &Model, bool) -> Result<(), String>,
    how: Taking,
) -> Result<(), String> {
    let mut random = Rng::with_seed(seed);
    let (sim, disk, _) = fresh(&mut random);
    let storage = disk.clone();
    let mut run = random.fork();
    let (image, before) = sim.block_on(async move {
        let image = open(&storage).await;
        let mut model =
            Model { active: vec![0; image.size() as usize], snapshots: BTreeMap::new() };
        for _ in 0..run.usize(1..=10) {
            scribble(&image, &mut model, &mut run).await.expect("no faults yet");
            if run.bool() {
                let change = change_snapshots(&image, &mut model, &mut run, how);
                change.await.expect("no faults yet");
            }
        }
        // Opened anew, so that nothing of what was done is still on its way.
        image.close().await.expect("no faults yet");
        (open(&storage).await, model)
    });
    prepare(&disk, &mut random);
    let mut after = before.clone();
    let mut run = random.fork();
    let task = sim.spawn(async move {
        let outcome = change_snapshots(&image, &mut after, &mut run, how).await;
        (outcome, after, image)
    });
    let mut images = Vec::new();
    let mut last = None;
    while sim.step() {
        let moment = disk.counts();
        if last.replace(moment) != Some(moment) {
            images.push(disk.crash(&mut random));
        }
    }
    let (outcome, wanted, image) = task.output().ok_or("it waits for ever")?;
    for left in images {
        let (found, report) = recover(left)?;
        if report.corruptions > 0 || (how == Taking::AtOnce && report.leaks > 0) {
            return Err(format!("after a crash: {report:?}"));
        }
        same(&found, &before).or_else(|_| same(&found, &wanted))?;
    }
    disk.clear_faults();
    let ended_well = outcome.is_ok();
    // Life goes on after a failure, or everything is refused: nothing is overwritten that may be in
    // use.
    let mut run = random.fork();
    let mut later = wanted.clone();
    let image = sim.block_on(async move {
        if !ended_well {
            for _ in 0..10 {
                let _ = scribble(&image, &mut later, &mut run).await;
            }
            let _ = image.flush(SyncMode::Data).await;
        }
        image
    });
    watch(&sim, &disk, &mut random, &before, &wanted, ended_well)?;
    drop(image);
    Ok(())
}

#[test]
fn a_crash_leaves_all_of_the_old_or_all_of_the_new() {
    let test = "a_crash_leaves_all_of_the_old_or_all_of_the_new";
    for_seeds(env!("CARGO_PKG_NAME"), test, 600, |seed| {
        change_once(
            seed,
            |_, _| {},
            |_, disk, _, _, wanted, ended_well| {
                assert!(ended_well);
                let (found, report) = recover(disk.content())?;
                same(&found, wanted)?;
                match report.corruptions + report.leaks {
                    0 => Ok(()),
                    _ => Err(format!("{report:?}")),
                }
            },
            taking(seed),
        )?;
        Ok(Report::default())
    });
}

#[test]
fn a_failed_operation_changes_nothing_or_all_of_it() {
    let test = "a_failed_operation_changes_nothing_or_all_of_it";
    for_seeds(env!("CARGO_PKG_NAME"), test, 1200, |seed| {
        let fail = |disk: &SimDisk, random: &mut Rng| {
            let errno = [errno::ENOSPC, errno::EIO][random.usize(..2)];
            disk.fail(Fault::nth(random.u64(..40), errno));
        };
        let judge =
            |_: &Sim, disk: &SimDisk, _: &mut Rng, before: &Model, wanted: &Model, ended_well| {
                let (found, report) = recover(disk.content())?;
                // After a failure the effect of later writes on the active disk is unknown.
                let any = |model: &Model| Model { active: found.active.clone(), ..model.clone() };
                if ended_well {
                    same(&found, wanted)?;
                } else {
                    same(&found, &any(before)).or_else(|_| same(&found, &any(wanted)))?;
                }
                match report.corruptions {
                    0 => Ok(()),
                    _ => Err(format!("{report:?}")),
                }
            };
        change_once(seed, fail, judge, taking(seed))?;
        Ok(Report::default())
    });
}

#[test]
fn names_have_limits_and_are_unique() {
    let mut random = Rng::with_seed(7);
    let (sim, disk, _) = fresh(&mut random);
    sim.block_on(async move {
        let image = open(&disk).await;
        let kind = async |name: &str| {
            image.snapshots().create(&new(name), None).await.map_err(|error| error.kind())
        };
        assert_eq!(kind("").await, Err(ErrorKind::InvalidInput));
        assert_eq!(kind(&"x".repeat(256)).await, Err(ErrorKind::InvalidInput));
        assert_eq!(kind("one").await.map(|made| made.id), Ok("1".into()));
        assert_eq!(kind("one").await, Err(ErrorKind::InvalidInput));
        assert_eq!(kind("two").await.map(|made| made.id), Ok("2".into()));
        let error = image.snapshots().rename("two", "one").await.unwrap_err();
        assert!(error.to_string().contains("'one' already"), "{error}");
        let error = image.snapshots().delete("three").await.unwrap_err();
        assert!(error.to_string().contains("no snapshot 'three'"), "{error}");
        image.snapshots().delete("1").await.expect("an id is as good as a name");
        assert_eq!(image.snapshots().list().await.unwrap()[0].name, "two");
    });
}

#[test]
fn a_name_that_is_no_text_is_found_as_it_is_listed() {
    let (sim, disk, _) = fresh(&mut Rng::with_seed(8));
    let made = disk.clone();
    sim.block_on(async move {
        let image = open(&made).await;
        image.snapshots().create(&new("before-update"), None).await.expect("there is room");
        image.close().await.expect("a good disk");
    });
    let mut bytes = disk.content();
    let name = bytes.windows(13).position(|bytes| bytes == b"before-update").expect("its name");
    bytes[name + 6] = 0xff;
    let disk = SimDisk::new(&sim, plain(), bytes);
    sim.block_on(async move {
        let image = open(&disk).await;
        let listed = image.snapshots().list().await.expect("a good image");
        assert_eq!(listed[0].name, "before\u{fffd}update");
        image.snapshots().delete(&listed[0].name).await.expect("it is listed so");
        assert!(image.snapshots().list().await.expect("a good image").is_empty());
    });
}

#[test]
fn narrow_refcounts_refuse_and_nothing_changes() {
    let sim = Sim::new(1);
    let disk = SimDisk::new(&sim, plain(), Vec::new());
    let left = disk.clone();
    sim.block_on(async move {
        let how = CreateOptions { refcount_bits: 1, ..CreateOptions::new(1 << 20) };
        create(&disk, &how).await.unwrap();
        let image = open(&disk).await;
        write(&image, 0, &[7; 4096], 0).await.unwrap();
        let error = image.snapshots().create(&new("one"), None).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        write(&image, 65_536, &[8; 4096], 0).await.expect("life goes on");
        image.close().await.unwrap();
    });
    let (found, report) = recover(left.content()).unwrap();
    assert!(found.snapshots.is_empty() && found.active[65_536] == 8);
    assert_eq!((report.corruptions, report.leaks), (0, 0), "{report:?}");
}

#[test]
fn a_snapshot_can_be_read_but_not_written() {
    let mut random = Rng::with_seed(3);
    let (sim, disk, _) = fresh(&mut random);
    sim.block_on(async move {
        let image = open(&disk).await;
        image.snapshots().create(&new("one"), None).await.unwrap();
        image.close().await.unwrap();
        let options = OpenOptions { access: Access::ReadWrite, ..OpenOptions::default() };
        let view = Qcow2::open_snapshot(disk.clone(), options, "one").await.unwrap();
        let error = write(&view, 0, &[1; 512], 0).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ReadOnly);
        view.close().await.expect("nothing is to be written");
    });
}

/// Has the L2 entries of a disk refer to clusters that have counters in different slices, and
/// refcounts of 0.
fn refer_to_everywhere(image: &mut [u8], entries: usize) {
    let word = |image: &[u8], at: usize| {
        u64::from_be_bytes(image[at..at + 8].try_into().expect("eight bytes"))
    };
    let l1 = word(image, 40) as usize;
    for number in 0..entries {
        let table = (word(image, l1 + number / 64 * 8) & 0x00ff_ffff_ffff_fe00) as usize;
        let host = (1 << 63) | ((number as u64 + 1) * 256 * 512);
        image[table + number % 64 * 8..][..8].copy_from_slice(&host.to_be_bytes());
    }
}

#[test]
fn counters_of_a_snapshot_are_not_kept_for_what_refcounts_do_not_tell_of() {
    let sim = Sim::new(1);
    let disk = SimDisk::new(&sim, plain(), Vec::new());
    let made = disk.clone();
    let entries = 4096;
    let size = entries as u64 * 512;
    sim.block_on(async move {
        let how = CreateOptions { cluster_size: 512, ..CreateOptions::new(size) };
        create(&made, &how).await.unwrap();
        let image = open(&made).await;
        write(&image, 0, &vec![7; size as usize], 0).await.unwrap();
        image.close().await.unwrap();
    });
    let mut content = disk.content();
    refer_to_everywhere(&mut content, entries);
    let sim = Sim::new(1);
    let disk = SimDisk::new(&sim, plain(), content.clone());
    let storage = disk.clone();
    sim.block_on(async move {
        let image = open(&storage).await;
        let plan = SnapshotPlan::Create(new("one"));
        let mut prepared = image.snapshots().prepare(plan).await.unwrap();
        let made = prepared.update(&|| false).await;
        assert_eq!(made.unwrap(), Preparation::AtOnce);
        drop(prepared);
        let error = image.snapshots().create(&new("one"), None).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert!(image.snapshots().list().await.unwrap().is_empty());
    });
}

/// Takes a snapshot of a device, mostly filled, that has space for its tables in the middle only.
fn take_on_full_device(how: Taking) -> Result<()> {
    let sim = Sim::new(1);
    let disk = SimDisk::new(&sim, plain(), Vec::new());
    let made = disk.clone();
    sim.block_on(async move {
        // The L1 table has more than one cluster.
        let how = CreateOptions { cluster_size: 4096, ..CreateOptions::new(8 << 30) };
        create(&made, &how).await.unwrap();
    });
    let mut content = disk.content();
    content.resize(16 << 20, 0);
    let disk = SimDisk::new(&sim, Config { size: Size::Fixed, ..plain() }, content);
    sim.block_on(async move {
        let image = open(&disk).await;
        for at in (0..15 << 20_u64).step_by(1 << 20) {
            write(&image, at, &vec![7; 1 << 20], 0).await.unwrap();
        }
        image.flush(SyncMode::Data).await.unwrap();
        for (start, end) in [(1 << 20, (1 << 20) + 4096), (4 << 20, 8 << 20)] {
            let range = ByteRange::between(start, end);
            unmap(&image, range, Intent::Discard, 0).await.unwrap();
        }
        image.close().await.unwrap();
        take(&open(&disk).await, "one", how).await
    })
}

#[test]
fn a_full_device_with_space_in_the_middle_has_room_for_a_snapshot() {
    for how in [Taking::AtOnce, Taking::Prepared] {
        take_on_full_device(how).expect("space for tables");
    }
}
