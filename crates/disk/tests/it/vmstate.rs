//! The state of a machine on a simulated disk: any offset in any order against a flat model, what
//! it costs in operations, crashes after every operation, a failure of every operation.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use blockhouse_core::{Alignment, Buffer, Durability, Fua, Request, Result, errno};
use blockhouse_disk::{
    Compression, Disk, Image, ImageFormat, Options, VmStateReader, VmStateWriter,
};
use blockhouse_format::qcow2::{self, Backing, CheckReport, CreateOptions, Qcow2, Switch, Version};
use blockhouse_sim::{Config, Fault, OperationKind, Report, Rng, Sim, SimDisk, for_seeds};

use crate::common::crash_points::at_every_operation;
use crate::qemu;

const MIB: u64 = 1 << 20;
const DISK: u64 = 1 << 20;

fn plain() -> Config {
    Config { alignment: Alignment::BYTE, fua: Fua::Emulated, ..Config::default() }
}

/// An image over nothing, or over a backing file that is longer than the state's place.
fn new_image(random: &mut Rng, compression: Option<Compression>) -> (Vec<u8>, CreateOptions) {
    let cluster_size = [4096, 65_536, 2 << 20][random.usize(..3)];
    let is_v2 = compression.is_none() && random.u8(..4) == 0;
    let options = CreateOptions {
        cluster_size,
        version: if is_v2 { Version::V2 } else { Version::V3 },
        extended_l2: match cluster_size {
            65_536 if !is_v2 && random.u8(..3) == 0 => Switch::On,
            _ => Switch::Off,
        },
        compression: compression.unwrap_or(Compression::Zlib),
        backing: (random.u8(..4) == 0)
            .then(|| Backing { name: b"base".to_vec(), format: Some("raw".into()) }),
        ..CreateOptions::new(DISK)
    };
    let sim = Sim::new(0);
    let disk = SimDisk::new(&sim, plain(), Vec::new());
    let (made, how) = (disk.clone(), options.clone());
    sim.block_on(async move { qcow2::create(&made, &how).await }).expect("a new image");
    (disk.content(), options)
}

async fn open(storage: SimDisk) -> Disk<SimDisk> {
    Disk::open(storage, ImageFormat::Qcow2, Options::default()).await.expect("a good image")
}

/// Bytes for the stream: noise, something that can be packed, or zeros.
fn some_bytes(random: &mut Rng, length: usize) -> Vec<u8> {
    match random.u8(..4) {
        0 => vec![0; length],
        1 => vec![random.u8(1..); length],
        _ => {
            let mut bytes = vec![0; length];
            random.fill(&mut bytes);
            bytes
        }
    }
}

/// Writes a random stream; the model is what it must become.
async fn store_some(
    disk: &Disk<SimDisk>,
    compression: Option<Compression>,
    model: &mut Vec<u8>,
    random: &mut Rng,
) -> Result<()> {
    let mut writer = VmStateWriter::new(disk, compression)?;
    for _ in 0..random.usize(1..15) {
        let length = match random.u8(..6) {
            0 => random.usize(1..200),
            1 => random.usize(1..300_000),
            2 => 1 << 20,
            _ => random.usize(1..40_000),
        };
        let offset = match random.u8(..4) {
            0 => random.usize(..4 << 20),
            1 => random.usize(..=model.len()),
            _ => model.len(),
        };
        let bytes = some_bytes(random, length);
        if model.len() < offset + length {
            model.resize(offset + length, 0);
        }
        model[offset..offset + length].copy_from_slice(&bytes);
        writer.write(offset as u64, &bytes).await?;
        if random.u8(..8) == 0 {
            writer.flush().await?;
        }
    }
    let snapshot = writer.finish("state").await?;
    assert_eq!(snapshot.vm_state_size, model.len() as u64);
    assert!(writer.write(0, &[1]).await.is_err(), "it is finished");
    Ok(())
}

/// The part of the state that is there.
async fn load(storage: SimDisk) -> Result<Vec<u8>> {
    let image =
        Image::open_snapshot(storage, ImageFormat::Qcow2, Options::default(), "state").await?;
    let image = if image.backing_file().is_some() { with_base(image) } else { image };
    all_of_state(&Disk::new(image)).await
}

async fn all_of_state(disk: &Disk<SimDisk>) -> Result<Vec<u8>> {
    let mut reader = VmStateReader::new(disk)?;
    let mut state = Vec::new();
    while let Some(buffer) = reader.next().await? {
        state.extend_from_slice(buffer.bytes());
        reader.recycle(buffer);
    }
    Ok(state)
}

/// Over a disk that has something everywhere: nothing of it may come to light.
fn with_base(image: Image<SimDisk>) -> Image<SimDisk> {
    let sim = Sim::new(0);
    // Far enough for the state of an image of small clusters.
    let base = SimDisk::new(&sim, plain(), vec![0xbb; 16 << 20]);
    image.with_backing(&Image::raw(base, Options::default()).expect("an image"))
}

fn check(content: Vec<u8>) -> (CheckReport, Vec<String>) {
    let sim = Sim::new(0);
    let disk = SimDisk::new(&sim, plain(), content);
    sim.block_on(async move {
        let image = Qcow2::open(disk, qcow2::OpenOptions::default()).await.expect("a good image");
        let report = qcow2::check(&image).await.expect("a good disk");
        let names = image.snapshots().list().await.expect("a good table");
        (report, names.into_iter().map(|one| one.name).collect())
    })
}

fn compression_of(random: &mut Rng) -> Option<Compression> {
    let kinds = [Compression::Zstd, Compression::Zlib];
    [None, Some(kinds[random.usize(..2)])][random.usize(..2)]
}

fn same(found: &[u8], wanted: &[u8]) -> Result<(), String> {
    match found.iter().zip(wanted).position(|(one, other)| one != other) {
        None if found.len() == wanted.len() => Ok(()),
        None => Err(format!("{} bytes instead of {}", found.len(), wanted.len())),
        Some(at) => Err(format!("byte {at} is {} instead of {}", found[at], wanted[at])),
    }
}

#[test]
fn any_offset_in_any_order_is_what_was_written_last() {
    let test = "any_offset_in_any_order_is_what_was_written_last";
    for_seeds(env!("CARGO_PKG_NAME"), test, 12, |seed| {
        let sim = Sim::new(seed);
        let mut random = sim.fork_prng();
        let compression = compression_of(&mut random);
        let (content, options) = new_image(&mut random, compression);
        let mut config = Config::random(&mut random);
        config.alignment.offset = config.alignment.offset.min(options.cluster_size as u32);
        let storage = SimDisk::new(&sim, config, content);
        let (opened, mut random) = (storage.clone(), random.fork());
        let (wanted, found) = sim.block_on(async move {
            let disk = open(opened.clone()).await;
            let mut model = Vec::new();
            store_some(&disk, compression, &mut model, &mut random).await.expect("no faults");
            disk.close().await.expect("no faults");
            (model, load(opened).await)
        });
        same(&found.map_err(|error| error.to_string())?, &wanted)
            .map_err(|what| format!("{what}; {compression:?} {options:?}"))?;
        let (report, names) = check(storage.content());
        if report.corruptions + report.leaks > 0 || names != ["state"] {
            return Err(format!("{report:?} {names:?}; {compression:?} {options:?}"));
        }
        Ok(Report::default())
    });
}

/// The cost of a sequential stream.
#[derive(Debug, PartialEq, Eq)]
struct Cost {
    /// Before the snapshot was taken, of anything.
    reads: u64,
    data_writes: u64,
    /// While it was taken.
    table_writes: u64,
    flushes: u64,
}

/// Stores `size` bytes, a multiple of 1 MiB, in pieces of the lengths that `next_length` says.
fn cost_of(cluster_size: u64, size: u64, mut next_length: impl FnMut() -> u64 + 'static) -> Cost {
    let sim = Sim::new(1);
    let storage = SimDisk::new(&sim, plain(), Vec::new());
    let inner = storage.clone();
    let (data, tables) = sim.block_on(async move {
        let how = CreateOptions { cluster_size, ..CreateOptions::new(DISK) };
        qcow2::create(&inner, &how).await.unwrap();
        let disk = open(inner.clone()).await;
        inner.take_log();
        let mut writer = VmStateWriter::new(&disk, None).unwrap();
        let bytes = vec![7; 32 << 10];
        while writer.size() < size {
            let length = next_length().min(size - writer.size()) as usize;
            writer.write(writer.size(), &bytes[..length]).await.unwrap();
        }
        writer.flush().await.unwrap();
        let data = inner.take_log();
        writer.finish("state").await.unwrap();
        (data, inner.take_log())
    });
    let count = |log: &[blockhouse_sim::Operation], kind| {
        log.iter().filter(|one| one.kind() == kind).count() as u64
    };
    Cost {
        reads: count(&data, OperationKind::Read),
        data_writes: count(&data, OperationKind::Write),
        table_writes: count(&tables, OperationKind::Write),
        flushes: count(&tables, OperationKind::Flush),
    }
}

#[test]
fn what_a_stream_costs_depends_on_its_clusters_and_not_on_its_pieces() {
    for cluster_size in [4096, 65_536] {
        for size in [8 * MIB, 64 * MIB] {
            let cost = cost_of(cluster_size, size, || 32 << 10);
            let mut random = Rng::with_seed(5);
            let crumbs = cost_of(cluster_size, size, move || random.u64(64..4096));
            assert_eq!(crumbs, cost, "{size} bytes in clusters of {cluster_size}");
            let clusters = size / cluster_size;
            // Where the file is full, refcount blocks are looked into; data is never read.
            let (l2_tables, blocks) = (clusters * 8 / cluster_size, clusters * 2 / cluster_size);
            assert!(cost.reads <= 1 + blocks, "{cost:?}");
            // A window that meets a place where a table was needed is written in two parts.
            let most = size / MIB + l2_tables + 2 * blocks + 2;
            assert!((size / MIB..=most).contains(&cost.data_writes), "{cost:?}");
            assert!(cost.table_writes <= l2_tables + 2 * blocks + 12, "{cost:?}");
            assert!(cost.flushes <= 8, "{cost:?}");
        }
    }
}

#[test]
fn a_crash_leaves_the_whole_state_or_no_snapshot() {
    let test = "a_crash_leaves_the_whole_state_or_no_snapshot";
    for_seeds(env!("CARGO_PKG_NAME"), test, 4, |seed| {
        let sim = Sim::new(seed);
        let mut random = sim.fork_prng();
        let compression = compression_of(&mut random);
        let (content, _) = new_image(&mut random, compression);
        let storage = SimDisk::new(&sim, plain(), content);
        let (inner, mut run) = (storage.clone(), random.fork());
        let storing = sim.spawn(async move {
            let disk = open(inner).await;
            if disk.image().backing_file().is_none() {
                let from = Buffer::new(8192).lend();
                let write = Request::Write { offset: 0, from, durability: Durability::None };
                disk.submit(write).await.expect("no faults");
            }
            let mut model = Vec::new();
            store_some(&disk, compression, &mut model, &mut run).await.expect("no faults");
            model
        });
        let mut images = Vec::new();
        let (model, _) = at_every_operation(&sim, &[&storage], &storing, || {
            let left = storage.crash(&mut random);
            let (report, names) = check(left.clone());
            if report.corruptions > 0 {
                return Err(format!("after a crash: {:?}", report.problems));
            }
            if !names.is_empty() {
                images.push(left);
            }
            Ok(())
        })?;
        for left in images {
            let sim = Sim::new(0);
            let disk = SimDisk::new(&sim, plain(), left);
            let found = sim.block_on(async move { load(disk).await });
            same(&found.map_err(|error| error.to_string())?, &model)?;
        }
        Ok(Report::default())
    });
}

#[test]
fn the_first_error_is_the_answer_to_every_call_that_follows() {
    let test = "the_first_error_is_the_answer_to_every_call_that_follows";
    let report = for_seeds(env!("CARGO_PKG_NAME"), test, 12, |seed| {
        let sim = Sim::new(seed);
        let mut random = sim.fork_prng();
        let compression = compression_of(&mut random);
        let (content, _) = new_image(&mut random, compression);
        let storage = SimDisk::new(&sim, plain(), content);
        let inner = storage.clone();
        let outcome = sim.block_on(async move {
            let disk = open(inner.clone()).await;
            let wanted = [errno::ENOSPC, errno::EIO][random.usize(..2)];
            let nth = random.u64(..25);
            inner.fail(Fault::nth(nth, wanted).of(OperationKind::Write));
            let mut writer = VmStateWriter::new(&disk, compression)?;
            let mut failed = false;
            for _ in 0..12 {
                let bytes = some_bytes(&mut random, 1_000_000);
                let outcome = writer.write(writer.size(), &bytes).await;
                assert!(outcome.is_err() || !failed, "an error is remembered");
                if let Err(error) = outcome {
                    assert_eq!(error.errno(), wanted);
                    failed = true;
                }
            }
            let finished = writer.finish("state").await;
            assert!(finished.is_err() || !failed, "an error is remembered");
            if let Err(error) = finished {
                assert_eq!(error.errno(), wanted);
                assert_eq!(writer.flush().await.map_err(|error| error.errno()), Err(wanted));
                failed = true;
            }
            drop(writer);
            inner.clear_faults();
            // Whether tables can be written after all depends on what failed.
            let closed = disk.close().await;
            Ok::<_, blockhouse_core::Error>((failed, closed.is_ok()))
        });
        let (failed, closed) = outcome.map_err(|error| error.to_string())?;
        let (report, names) = check(storage.content());
        let leaks = if closed { report.leaks } else { 0 };
        if report.corruptions + leaks > 0 || (!failed && names != ["state"]) {
            return Err(format!("failed: {failed}, closed: {closed}, {names:?}, {report:?}"));
        }
        Ok(Report { failed: failed.into(), ..Report::default() })
    });
    eprintln!("{report:?}");
}

/// Stores 5 MiB while the `nth` write fails; whether it was stored all the same.
fn store_with_failure(nth: u64, compression: Option<Compression>, wanted: i32) -> bool {
    let sim = Sim::new(nth);
    let (content, _) = new_image(&mut Rng::with_seed(3), compression);
    let storage = SimDisk::new(&sim, plain(), content);
    let inner = storage.clone();
    let (stored, is_known, closed) = sim.block_on(async move {
        let disk = open(inner.clone()).await;
        inner.fail(Fault::nth(nth, wanted).of(OperationKind::Write));
        let mut writer = VmStateWriter::new(&disk, compression).expect("it may be written");
        let mut random = Rng::with_seed(nth);
        let mut bytes = vec![0; 300_000];
        random.fill(&mut bytes[..200_000]);
        let mut failed = false;
        while writer.size() < 5 * MIB {
            let size = writer.size();
            let outcome = writer.write(size, &bytes).await;
            assert!(outcome.is_err() || !failed, "an error is remembered");
            if let Err(error) = outcome {
                assert_eq!(error.errno(), wanted);
                failed = true;
                assert_eq!(writer.flush().await.map_err(|error| error.errno()), Err(wanted));
                break;
            }
        }
        let finished = writer.finish("state").await.map_err(|error| error.errno());
        let stored = finished.is_ok();
        let mut is_known = true;
        if !stored {
            assert_eq!(finished.err(), Some(wanted));
            let again = writer.write(0, &[1]).await.map_err(|error| error.errno());
            assert_eq!(again, Err(wanted), "told to each call, once");
            let listed = disk.snapshots().list().await;
            // A last write that failed may have taken effect or not, and the error says so.
            is_known = listed.is_ok();
            assert!(listed.is_ok_and(|all| all.is_empty()) || !is_known, "write {nth}");
        }
        assert!(!(stored && failed), "an error is remembered");
        drop(writer);
        inner.clear_faults();
        (stored, is_known, disk.close().await.is_ok())
    });
    let (report, names) = check(storage.content());
    assert_eq!(report.corruptions, 0, "write {nth}: {report:?}");
    // A change that could not be written is left for a repair.
    assert!(report.leaks == 0 || !closed, "write {nth}: {report:?}");
    assert!(names.len() == usize::from(stored) || !is_known, "write {nth}: {names:?}");
    stored
}

#[test]
fn each_write_of_a_save_may_fail() {
    for compression in [None, Some(Compression::Zstd)] {
        for wanted in [errno::ENOSPC, errno::EIO] {
            let failures = (0..).take_while(|&nth| !store_with_failure(nth, compression, wanted));
            let failures = failures.count();
            assert!(failures > 8, "only {failures} writes for 5 MiB and their tables");
        }
    }
}

#[test]
fn a_save_that_fails_keeps_no_memory() {
    let fail = |nth| {
        assert!(!store_with_failure(nth, None, errno::EIO));
    };
    // The parts that are made once for all are made now.
    (0..8).for_each(fail);
    let kept = allocation_counter::measure(|| (0..8).for_each(fail));
    assert_eq!((kept.count_current, kept.bytes_current), (0, 0), "{kept:?}");
}

#[test]
fn a_state_that_is_given_up_leaves_nothing() {
    let sim = Sim::new(1);
    let mut random = sim.fork_prng();
    let (content, _) = new_image(&mut random, None);
    let storage = SimDisk::new(&sim, plain(), content);
    let inner = storage.clone();
    sim.block_on(async move {
        let disk = open(inner).await;
        let mut writer = VmStateWriter::new(&disk, None).unwrap();
        writer.write(0, &vec![7; 5 << 20]).await.unwrap();
        writer.abandon().await;
        disk.close().await.unwrap();
    });
    let (report, names) = check(storage.content());
    assert_eq!((report.corruptions, report.leaks, names.len()), (0, 0, 0), "{report:?}");
}

/// The content of a snapshot.
#[derive(Clone)]
struct Kept {
    disk: Vec<u8>,
    /// Empty for a snapshot of the disk alone.
    state: Vec<u8>,
}

async fn all_of(disk: &Disk<SimDisk>) -> Vec<u8> {
    let mut buffer = Buffer::new(DISK as usize);
    let read = Request::Read { offset: 0, into: buffer.lend() };
    disk.submit(read).await.expect("a good disk");
    buffer.bytes().to_vec()
}

/// One random change: of the guest's data, of the snapshots, or a state that is stored or dropped.
async fn change(
    disk: &Disk<SimDisk>,
    compression: Option<Compression>,
    active: &mut Vec<u8>,
    kept: &mut BTreeMap<String, Kept>,
    random: &mut Rng,
) -> Result<()> {
    let name = format!("s{}", random.u32(..));
    let any = |random: &mut Rng| kept.keys().nth(random.usize(..kept.len())).cloned();
    match random.u8(..8) {
        0 => {
            disk.snapshots().create(&name).await?;
            kept.insert(name, Kept { disk: active.clone(), state: Vec::new() });
        }
        1 | 2 => {
            let mut writer = VmStateWriter::new(disk, compression)?;
            let mut state = Vec::new();
            for _ in 0..random.usize(1..5) {
                let length = random.usize(1..600_000);
                let bytes = some_bytes(random, length);
                writer.write(writer.size(), &bytes).await?;
                state.extend(bytes);
            }
            if random.u8(..4) == 0 {
                writer.abandon().await;
            } else {
                writer.finish(&name).await?;
                kept.insert(name, Kept { disk: active.clone(), state });
            }
        }
        3 if !kept.is_empty() => {
            let name = any(random).expect("there are some");
            disk.snapshots().apply(&name).await?;
            active.clone_from(&kept[&name].disk);
        }
        4 if !kept.is_empty() => {
            let name = any(random).expect("there are some");
            disk.snapshots().delete(&name).await?;
            kept.remove(&name);
        }
        _ => {
            let length = random.usize(1..100_000);
            let offset = random.usize(..active.len() - length);
            let mut buffer = Buffer::new(length);
            buffer.bytes_mut().fill(random.u8(..));
            active[offset..offset + length].copy_from_slice(buffer.bytes());
            let (offset, from) = (offset as u64, buffer.lend());
            let durability = [Durability::None, Durability::Data][random.usize(..2)];
            disk.submit(Request::Write { offset, from, durability }).await?;
        }
    }
    Ok(())
}

/// QEMU finds nothing wrong, and reads the disks of all snapshots as we do.
fn ask_qemu(content: &[u8], kept: &BTreeMap<String, Kept>) {
    let folder = tempfile::tempdir().expect("a folder");
    let [image, part, wanted] =
        ["image.qcow2", "part.raw", "wanted.raw"].map(|name| folder.path().join(name));
    std::fs::write(&image, content).expect("room");
    let run = |words: &[&str], files: &[&Path]| {
        let output =
            qemu::output(Command::new("qemu-img").args(words).args(files)).expect("qemu-img");
        assert!(output.status.success(), "{words:?}: {output:?}");
    };
    run(&["check", "-q"], &[&image]);
    for (name, one) in kept {
        let snapshot = format!("snapshot.name={name}");
        run(&["convert", "-f", "qcow2", "-O", "raw", "-l", &snapshot], &[&image, &part]);
        std::fs::write(&wanted, &one.disk).expect("room");
        run(&["compare", "-q", "-f", "raw", "-F", "raw"], &[&part, &wanted]);
    }
}

fn grow_a_tree(seed: u64) -> Result<Report, String> {
    let sim = Sim::new(seed);
    let mut random = sim.fork_prng();
    let compression = compression_of(&mut random);
    let cluster_size = [4096, 65_536][random.usize(..2)];
    let of_image = compression.unwrap_or(Compression::Zlib);
    let how = CreateOptions { cluster_size, compression: of_image, ..CreateOptions::new(DISK) };
    let storage = SimDisk::new(&sim, plain(), Vec::new());
    let inner = storage.clone();
    let kept = sim.block_on(async move {
        qcow2::create(&inner, &how).await?;
        let disk = open(inner).await;
        let (mut active, mut kept) = (vec![0; DISK as usize], BTreeMap::new());
        for _ in 0..random.usize(1..25) {
            change(&disk, compression, &mut active, &mut kept, &mut random).await?;
        }
        assert!(all_of(&disk).await == active, "the disk itself");
        disk.close().await?;
        Ok::<_, blockhouse_core::Error>(kept)
    });
    let kept = kept.map_err(|error| error.to_string())?;
    let (report, names) = check(storage.content());
    if report.corruptions + report.leaks > 0 || names.len() != kept.len() {
        return Err(format!("{report:?}, {names:?}"));
    }
    if seed.is_multiple_of(4) && qemu::is_installed() {
        ask_qemu(&storage.content(), &kept);
    }
    let reading = sim.block_on(async move {
        for (name, Kept { disk: wanted, state }) in kept {
            let view = Image::open_snapshot(
                storage.clone(),
                ImageFormat::Qcow2,
                Options::default(),
                &name,
            )
            .await;
            let view = Disk::new(view.expect("it is there"));
            same(&all_of(&view).await, &wanted)?;
            if state.is_empty() {
                assert!(VmStateReader::new(&view).is_err(), "there is none")
            } else {
                same(&all_of_state(&view).await.expect("a state"), &state)?
            }
        }
        Ok::<_, String>(())
    });
    reading.map(|()| Report::default())
}

#[test]
fn random_trees_with_states_hold_what_they_held() {
    let test = "random_trees_with_states_hold_what_they_held";
    for_seeds(env!("CARGO_PKG_NAME"), test, 30, grow_a_tree);
}
