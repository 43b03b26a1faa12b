//! The state of a machine on a simulated disk: any offset in any order against a flat model, what it costs in
//! operations, crashes after every operation, a failure of every operation.
#![forbid(unsafe_code)]

use blockhouse_core::{Alignment, Buffer, Durability, Fua, Request, Result, errno};
use blockhouse_disk::{Compression, Disk, Options, StatePacking};
use blockhouse_format::qcow2::{self, Backing, CheckReport, CreateOptions, Qcow2, Switch, Version};
use blockhouse_sim::{Config, Fault, OperationKind, Report, Rng, Sim, SimDisk, for_seeds};

const MIB: u64 = 1 << 20;
const DISK: u64 = 1 << 20;

fn plain() -> Config {
    Config { alignment: Alignment::BYTE, fua: Fua::Emulated, ..Config::default() }
}

/// An image over nothing, or over a backing file that is longer than the state's place.
fn new_image(random: &mut Rng, packing: StatePacking) -> (Vec<u8>, CreateOptions) {
    let cluster_size = [4096, 65_536, 2 << 20][random.usize(..3)];
    let is_v2 = packing == StatePacking::None && random.u8(..4) == 0;
    let options = CreateOptions {
        cluster_size,
        version: if is_v2 { Version::V2 } else { Version::V3 },
        extended_l2: match cluster_size {
            65_536 if !is_v2 && random.u8(..3) == 0 => Switch::On,
            _ => Switch::Off,
        },
        compression: match packing {
            StatePacking::Compressed(kind) => kind,
            StatePacking::None => Compression::Zlib,
        },
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
    Disk::qcow2(storage, Options::default()).await.expect("a good image")
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
    packing: StatePacking,
    model: &mut Vec<u8>,
    random: &mut Rng,
) -> Result<()> {
    let mut writer = disk.save_vm_state(packing)?;
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

/// What is there of the state.
async fn load(storage: SimDisk) -> Result<Vec<u8>> {
    let disk = Disk::qcow2_snapshot(storage, Options::default(), "state").await?;
    let disk = if disk.backing_file().is_some() { with_base(disk) } else { disk };
    let mut reader = disk.load_vm_state()?;
    let mut state = Vec::new();
    while let Some(buffer) = reader.next().await? {
        state.extend_from_slice(buffer.bytes());
        reader.recycle(buffer);
    }
    Ok(state)
}

/// Over a disk that has something everywhere: nothing of it may come to light.
fn with_base(disk: Disk<SimDisk>) -> Disk<SimDisk> {
    let sim = Sim::new(0);
    // Far enough for the state of an image of small clusters.
    let base = SimDisk::new(&sim, plain(), vec![0xbb; 16 << 20]);
    disk.over(std::sync::Arc::new(Disk::raw(base, Options::default()).expect("a disk")))
}

fn check(content: Vec<u8>) -> (CheckReport, Vec<String>) {
    let sim = Sim::new(0);
    let disk = SimDisk::new(&sim, plain(), content);
    sim.block_on(async move {
        let image = Qcow2::open(disk, qcow2::OpenOptions::default()).await.expect("a good image");
        let report = qcow2::check(&image).await.expect("a good disk");
        let names = image.snapshots().await.expect("a good table");
        (report, names.into_iter().map(|one| one.name).collect())
    })
}

fn packing_of(random: &mut Rng) -> StatePacking {
    let kinds = [Compression::Zstd, Compression::Zlib];
    [StatePacking::None, StatePacking::Compressed(kinds[random.usize(..2)])][random.usize(..2)]
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
        let mut random = sim.fork_random();
        let packing = packing_of(&mut random);
        let (content, options) = new_image(&mut random, packing);
        let mut config = Config::random(&mut random);
        config.alignment.offset = config.alignment.offset.min(4096);
        let storage = SimDisk::new(&sim, config, content);
        let (opened, mut random) = (storage.clone(), random.fork());
        let (wanted, found) = sim.block_on(async move {
            let disk = open(opened.clone()).await;
            let mut model = Vec::new();
            store_some(&disk, packing, &mut model, &mut random).await.expect("no faults");
            disk.close().await.expect("no faults");
            (model, load(opened).await)
        });
        same(&found.map_err(|error| error.to_string())?, &wanted)
            .map_err(|what| format!("{what}; {packing:?} {options:?}"))?;
        let (report, names) = check(storage.content());
        if report.corruptions + report.leaks > 0 || names != ["state"] {
            return Err(format!("{report:?} {names:?}; {packing:?} {options:?}"));
        }
        Ok(Report::default())
    });
}

#[test]
fn a_stream_of_crumbs_costs_large_writes_and_hardly_any_tables() {
    let sim = Sim::new(1);
    let storage = SimDisk::new(&sim, plain(), Vec::new());
    let inner = storage.clone();
    let log = sim.block_on(async move {
        let how = CreateOptions { cluster_size: 65_536, ..CreateOptions::new(DISK) };
        qcow2::create(&inner, &how).await.unwrap();
        let disk = open(inner.clone()).await;
        inner.take_log();
        let mut writer = disk.save_vm_state(StatePacking::None).unwrap();
        let mut random = Rng::with_seed(5);
        while writer.size() < 64 * MIB {
            let bytes: Vec<u8> = (0..random.usize(64..32_768)).map(|_| random.u8(1..)).collect();
            writer.write(writer.size(), &bytes).await.unwrap();
        }
        writer.flush().await.unwrap();
        let data = inner.take_log();
        writer.finish("state").await.unwrap();
        (data, inner.take_log())
    });
    let count = |log: &[blockhouse_sim::Operation], kind| {
        log.iter().filter(|one| one.kind() == kind).count() as u64
    };
    let (data, tables) = log;
    // Where the file is full, a refcount block is looked into; data is never read.
    assert!(count(&data, OperationKind::Read) <= 1, "{}", count(&data, OperationKind::Read));
    let writes = count(&data, OperationKind::Write);
    assert!((64..=66).contains(&writes), "{writes} writes for 64 MiB");
    assert!(count(&tables, OperationKind::Write) <= 16, "{tables:?}");
    assert!(count(&tables, OperationKind::Flush) <= 8, "{tables:?}");
}

#[test]
fn a_crash_leaves_the_whole_state_or_no_snapshot() {
    let test = "a_crash_leaves_the_whole_state_or_no_snapshot";
    for_seeds(env!("CARGO_PKG_NAME"), test, 4, |seed| {
        let sim = Sim::new(seed);
        let mut random = sim.fork_random();
        let packing = packing_of(&mut random);
        let (content, _) = new_image(&mut random, packing);
        let storage = SimDisk::new(&sim, plain(), content);
        let (inner, mut run) = (storage.clone(), random.fork());
        let storing = sim.spawn(async move {
            let disk = open(inner).await;
            if disk.backing_file().is_none() {
                let from = Buffer::new(8192).lend();
                let write = Request::Write { offset: 0, from, durability: Durability::None };
                disk.submit(write).await.expect("no faults");
            }
            let mut model = Vec::new();
            store_some(&disk, packing, &mut model, &mut run).await.expect("no faults");
            model
        });
        let mut last = None;
        let mut images = Vec::new();
        while sim.step() {
            let moment = storage.counts();
            if last.replace(moment) != Some(moment) && random.u8(..8) == 0 {
                images.push(storage.crash(&mut random));
            }
        }
        let model = storing.output().ok_or("it waits for ever")?;
        for left in images {
            let (report, names) = check(left.clone());
            if report.corruptions > 0 {
                return Err(format!("after a crash: {:?}", report.problems));
            }
            if names.is_empty() {
                continue;
            }
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
        let mut random = sim.fork_random();
        let packing = packing_of(&mut random);
        let (content, _) = new_image(&mut random, packing);
        let storage = SimDisk::new(&sim, plain(), content);
        let inner = storage.clone();
        let outcome = sim.block_on(async move {
            let disk = open(inner.clone()).await;
            let wanted = [errno::ENOSPC, errno::EIO][random.usize(..2)];
            let nth = random.u64(..25);
            inner.fail(Fault::nth(nth, wanted).of(OperationKind::Write));
            let mut writer = disk.save_vm_state(packing)?;
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

#[test]
fn a_state_that_is_given_up_leaves_nothing() {
    let sim = Sim::new(1);
    let mut random = sim.fork_random();
    let (content, _) = new_image(&mut random, StatePacking::None);
    let storage = SimDisk::new(&sim, plain(), content);
    let inner = storage.clone();
    sim.block_on(async move {
        let disk = open(inner).await;
        let mut writer = disk.save_vm_state(StatePacking::None).unwrap();
        writer.write(0, &vec![7; 5 << 20]).await.unwrap();
        writer.abandon().await;
        disk.close().await.unwrap();
    });
    let (report, names) = check(storage.content());
    assert_eq!((report.corruptions, report.leaks, names.len()), (0, 0, 0), "{report:?}");
}
