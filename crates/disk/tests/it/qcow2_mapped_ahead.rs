//! Clusters that are mapped ahead of a run of first writes: what such writes cost, where nothing is
//! mapped ahead, that the disk is the same as without, and that no death of the process forgets
//! them.

use std::rc::Rc;
use std::sync::Arc;

use blockhouse_core::{Durability, Fallback, Request, Unmap, errno};
use blockhouse_disk::{Disk, Image, ImageFormat, NewBitmap, Options, Replay};
use blockhouse_format::qcow2::{self, Backing, CreateOptions, Qcow2, Switch, Version};
use blockhouse_sim::{Fault, Operation, OperationKind, Rng, Sim, SimDisk, SimMemory};

use crate::common::{Rig, discard, span, write};
use crate::crashed::{plain_config, read_all};
use crate::qcow2_prepared::{CLUSTER, SIZE, able, changes, rig};

const FUA: Durability = Durability::Data;
const PLAIN: Durability = Durability::None;

/// Writes a block durably to each of these clusters, one after the other. Returns for each how many
/// writes that took.
fn writes_of(rig: &Rig, clusters: impl IntoIterator<Item = u64>) -> Vec<usize> {
    let count = |cluster: u64| {
        rig.submit(write(cluster * CLUSTER + 4096, 4096, 3, FUA)).unwrap();
        let done = changes(rig);
        let is_write = |one: &&Operation| matches!(one, Operation::Write(_, FUA));
        let count = done.iter().filter(is_write).count();
        let is_preparing =
            matches!(done[..], [Operation::PrepareZeroes(_), Operation::Flush(_), ..]);
        assert_eq!(done.len(), count + if is_preparing { 2 } else { 0 }, "{done:?}");
        count
    };
    clusters.into_iter().map(count).collect()
}

/// Asserts that the image has neither leaks nor corruption. Returns the number of clusters that
/// guests see as mapped.
fn check(image: Vec<u8>) -> u64 {
    let sim = Sim::new(0);
    let storage = SimDisk::new(&sim, plain_config(), image);
    sim.block_on(async move {
        let image = Qcow2::open(storage, qcow2::OpenOptions::default()).await.unwrap();
        let report = qcow2::check(&image).await.unwrap();
        assert_eq!((report.corruptions, report.leaks), (0, 0), "{:?}", report.problems);
        report.allocated_clusters
    })
}

fn zeros_that_stay(offset: u64) -> Request {
    let (range, unmap) = (span(offset, CLUSTER), Unmap::Forbidden);
    Request::WriteZeroes { range, unmap, fallback: Fallback::Allowed, durability: PLAIN }
}

fn close(rig: &Rig) {
    let disk = Rc::clone(&rig.disk);
    rig.sim.block_on(async move { disk.close().await }).unwrap();
}

#[test]
fn a_run_of_first_durable_writes_is_overwrites_but_for_few() {
    let rig = rig(able());
    let counts = writes_of(&rig, 0..300);
    assert_eq!(counts[..12], [3, 3, 1, 1, 3, 1, 1, 1, 1, 1, 3, 1], "twice as many each time");
    assert_eq!(counts[..20].iter().sum::<usize>(), 28);
    // Later, as many as are prepared together: 64 clusters.
    for twenty in counts[60..].chunks(20) {
        let sum = twenty.iter().sum::<usize>();
        assert!((20..=22).contains(&sum), "{sum}");
    }
    assert!(counts[60..].iter().sum::<usize>() <= 240 + 2 * 8);
    let mut expected = vec![0; CLUSTER as usize];
    expected[4096..8192].fill(3);
    (0..300)
        .for_each(|cluster| assert_eq!(rig.read(cluster * CLUSTER, CLUSTER as usize), expected));
    let rest = rig.read(300 * CLUSTER, (210 * CLUSTER) as usize);
    assert!(rest.iter().all(|&byte| byte == 0), "what was mapped ahead reads as before");
    close(&rig);
    let mapped = check(rig.storage.content());
    assert!((302..=302 + 64).contains(&mapped), "{mapped}");
}

#[test]
fn scattered_writes_map_nothing_ahead() {
    let rig = rig(able());
    let scattered = (0..100).map(|index| index * 7 % 509);
    assert_eq!(writes_of(&rig, scattered), [3; 100]);
    close(&rig);
    assert_eq!(check(rig.storage.content()), 102);
}

/// An image whose clusters from 0 on are written in a run, but for what `prepare` has done before.
fn run_after(options: CreateOptions, prepare: impl FnOnce(&Rig)) -> (Rig, Vec<usize>) {
    let rig = Rig::qcow2(able(), options);
    rig.submit(write(SIZE - CLUSTER, 4096, 1, PLAIN)).unwrap();
    prepare(&rig);
    rig.submit(Request::Flush).unwrap();
    rig.submit(write(SIZE - 2 * CLUSTER, 4096, 1, FUA)).unwrap();
    rig.log();
    let counts = writes_of(&rig, 0..30);
    (rig, counts)
}

#[test]
fn nothing_is_mapped_ahead_over_what_is_there() {
    let (rig, counts) = run_after(CreateOptions::new(SIZE), |rig| {
        rig.submit(write(12 * CLUSTER, CLUSTER as usize, 9, PLAIN)).unwrap();
        rig.submit(write(15 * CLUSTER, CLUSTER as usize, 9, PLAIN)).unwrap();
        rig.submit(zeros_that_stay(15 * CLUSTER)).unwrap();
    });
    // 10 maps 11 ahead; 12 is an overwrite; 14 cannot map 15, which has a host cluster that does
    // not hold its data.
    assert_eq!(counts[10..20], [3, 1, 1, 3, 3, 2, 3, 3, 1, 1]);
    let mut kept = vec![9; CLUSTER as usize];
    kept[4096..8192].fill(3);
    assert_eq!(rig.read(12 * CLUSTER, CLUSTER as usize), kept);
    let mut zeros = vec![0; CLUSTER as usize];
    zeros[4096..8192].fill(3);
    assert_eq!(rig.read(15 * CLUSTER, CLUSTER as usize), zeros);
    close(&rig);
    check(rig.storage.content());
}

#[test]
fn nothing_is_mapped_ahead_at_subclusters() {
    let options = CreateOptions { extended_l2: Switch::On, ..CreateOptions::new(SIZE) };
    assert_eq!(run_after(options, |_| {}).1, [3; 30]);
}

#[test]
fn in_an_overlay_only_zeros_are_mapped_ahead() {
    let sim = Sim::new(1);
    let storage = SimDisk::new(&sim, able(), Vec::new());
    let base = SimDisk::new(&sim, plain_config(), vec![5; SIZE as usize]);
    let opened = storage.clone();
    let disk = sim.block_on(async move {
        let backing = Some(Backing { name: b"base".to_vec(), format: Some("raw".into()) });
        let options = CreateOptions { backing, ..CreateOptions::new(SIZE) };
        qcow2::create(&opened, &options).await.unwrap();
        let image = Image::open(opened, ImageFormat::Qcow2, Options::default()).await.unwrap();
        Disk::new(image.with_backing(&Image::raw(base, Options::default()).unwrap()))
    });
    let rig = Rig { sim, storage, disk: Rc::new(disk) };
    rig.submit(discard(100 * CLUSTER, 100 * CLUSTER)).unwrap();
    rig.submit(write(SIZE - CLUSTER, 4096, 1, PLAIN)).unwrap();
    rig.submit(Request::Flush).unwrap();
    rig.submit(write(SIZE - 2 * CLUSTER, 4096, 1, FUA)).unwrap();
    rig.log();
    assert!(writes_of(&rig, 0..30).iter().all(|&count| count >= 3), "what is around is copied");
    assert_eq!(writes_of(&rig, 100..112), [3, 3, 1, 1, 3, 1, 1, 1, 1, 1, 3, 1]);
    writes_of(&rig, 195..205);
    assert_eq!(rig.read(205 * CLUSTER, CLUSTER as usize), vec![5; CLUSTER as usize]);
    assert_eq!(rig.read(194 * CLUSTER, CLUSTER as usize), vec![0; CLUSTER as usize]);
    assert_eq!(rig.read(201 * CLUSTER, 4096), [5; 4096]);
}

#[test]
fn a_longer_disk_maps_nothing_ahead_beyond_the_end_that_it_has() {
    const SHORT: u64 = 8 * CLUSTER;
    const LONG: u64 = 16 * CLUSTER;
    let sim = Sim::new(1);
    let storage = SimDisk::new(&sim, able(), Vec::new());
    let base = SimDisk::new(&sim, plain_config(), vec![5; LONG as usize]);
    let opened = storage.clone();
    let disk = sim.block_on(async move {
        let backing = Some(Backing { name: b"base".to_vec(), format: Some("raw".into()) });
        // Without zero flags, what the backing file has beyond the end is covered by clusters of
        // zeros.
        let version = Version::V2;
        let options = CreateOptions { backing, version, ..CreateOptions::new(SHORT) };
        qcow2::create(&opened, &options).await.unwrap();
        let image = Image::open(opened, ImageFormat::Qcow2, Options::default()).await.unwrap();
        Disk::new(image.with_backing(&Image::raw(base, Options::default()).unwrap()))
    });
    let rig = Rig { sim, storage, disk: Rc::new(disk) };
    for cluster in 0..8 {
        rig.submit(write(cluster * CLUSTER, 4096, 3, FUA)).unwrap();
    }
    let disk = Rc::clone(&rig.disk);
    rig.sim.block_on(async move { disk.resize(LONG).await }).unwrap();
    assert_eq!(rig.read(SHORT, (LONG - SHORT) as usize), vec![0; (LONG - SHORT) as usize]);
    close(&rig);
    check(rig.storage.content());
}

#[test]
fn bitmaps_know_nothing_of_what_is_mapped_ahead() {
    let rig = rig(able());
    let disk = Rc::clone(&rig.disk);
    rig.sim.block_on(async move {
        let granularity = Some(CLUSTER);
        let new = NewBitmap { name: "changes".to_owned(), granularity, is_enabled: true };
        disk.bitmaps().add(&new).await.unwrap();
    });
    rig.log();
    for cluster in 0..23 {
        rig.submit(write(cluster * CLUSTER, 4096, 3, FUA)).unwrap();
    }
    let disk = Rc::clone(&rig.disk);
    let found = rig.sim.block_on(async move {
        disk.bitmaps().extents("changes", span(0, SIZE), 100).await.unwrap()
    });
    let dirty = found.iter().filter(|one| one.is_dirty).map(|one| one.length);
    assert_eq!(dirty.sum::<u64>(), 23 * CLUSTER);
}

#[test]
fn what_is_mapped_ahead_is_discarded_zeroed_and_shared_as_anything_is() {
    let rig = rig(able());
    writes_of(&rig, 0..11);
    let disk = Rc::clone(&rig.disk);
    rig.sim.block_on(async move { disk.snapshots().create("first").await.unwrap() });
    rig.log();
    // Mapped ahead, and shared now.
    rig.submit(write(11 * CLUSTER, 4096, 4, FUA)).unwrap();
    rig.submit(discard(12 * CLUSTER, 3 * CLUSTER)).unwrap();
    rig.submit(zeros_that_stay(15 * CLUSTER)).unwrap();
    rig.submit(write(15 * CLUSTER + 512, 512, 4, FUA)).unwrap();
    for cluster in 22..40 {
        rig.submit(write(cluster * CLUSTER, 4096, 3, FUA)).unwrap();
    }
    assert_eq!(rig.read(11 * CLUSTER, 4096), [4; 4096]);
    assert!(rig.read(12 * CLUSTER, (3 * CLUSTER) as usize).iter().all(|&byte| byte == 0));
    assert_eq!(rig.read(15 * CLUSTER, 512), [0; 512]);
    assert_eq!(rig.read(15 * CLUSTER + 512, 512), [4; 512]);
    let disk = Rc::clone(&rig.disk);
    rig.sim.block_on(async move { disk.snapshots().delete("first").await.unwrap() });
    close(&rig);
    check(rig.storage.content());
}

#[test]
fn what_a_failed_write_has_mapped_ahead_is_durable_with_the_first_write_to_it() {
    let rig = rig(able());
    rig.submit(write(0, 4096, 3, FUA)).unwrap();
    rig.storage.fail(Fault::nth(0, errno::EIO).of(OperationKind::Write));
    rig.submit(write(CLUSTER, 4096, 3, PLAIN)).unwrap_err();
    rig.log();
    assert_eq!(writes_of(&rig, [2, 3]), [3, 1], "data, refcount, entry; then an overwrite");
    for seed in 0..10 {
        let sim = Sim::new(0);
        let image = rig.storage.crash(&mut Rng::with_seed(seed));
        let storage = SimDisk::new(&sim, plain_config(), image);
        let bytes = sim.block_on(async move {
            let disk = Disk::open(storage, ImageFormat::Qcow2, Options::default()).await;
            read_all(&disk.expect("a clean image")).await.unwrap()
        });
        let at = |cluster: u64| &bytes[(cluster * CLUSTER + 4096) as usize..][..4096];
        assert!(at(1).iter().all(|&byte| byte == 0), "a write that failed");
        assert!(at(2).iter().chain(at(3)).all(|&byte| byte == 3), "answered");
    }
}

/// The next process's findings after a death: opened, replayed, read, closed. Returns how many
/// entries were replayed, and the guest's bytes.
fn next_process(
    storage: &SimDisk,
    memory: &SimMemory,
    random: &mut Rng,
) -> Result<(u64, Vec<u8>), String> {
    let next = Sim::new(random.u64(..));
    let (storage, memory) = (storage.after_death(&next, random), memory.after_death(&next));
    let opened = storage.clone();
    let found = next.block_on(async move {
        let options = Options::default();
        let disk = Image::open_before_replay(opened, ImageFormat::Qcow2, options, &memory).await;
        let disk = Disk::new(disk.map_err(|error| error.to_string())?);
        let changes = match disk.image().replay(&memory).await.map_err(|error| error.to_string())? {
            Replay::Nothing => 0,
            Replay::Applied { changes } => changes,
            Replay::Refused { why } => return Err(why),
        };
        let bytes = read_all(&disk).await?;
        disk.close().await.map_err(|error| error.to_string())?;
        Ok((changes, bytes))
    })?;
    let sim = Sim::new(0);
    let storage = SimDisk::new(&sim, plain_config(), storage.content());
    let report = sim.block_on(async move {
        let image = Qcow2::open(storage, qcow2::OpenOptions::default()).await.unwrap();
        qcow2::check(&image).await.unwrap()
    });
    match report.corruptions {
        0 => Ok(found),
        _ => Err(format!("{:?}", report.problems)),
    }
}

fn with_log(rig: &Rig) -> Arc<SimMemory> {
    let memory = Arc::new(SimMemory::new(&rig.sim, rig.disk.image().redo_log_words()));
    rig.disk.image().attach_redo_log(Arc::clone(&memory) as _);
    memory
}

#[test]
fn a_write_to_what_is_mapped_ahead_outlives_the_process() {
    let rig = rig(able());
    let memory = with_log(&rig);
    rig.submit(write(0, 4096, 3, FUA)).unwrap();
    // The first of these maps two ahead. Nothing of that is on disk.
    for cluster in 1..4 {
        rig.submit(write(cluster * CLUSTER, 4096, 3, PLAIN)).unwrap();
    }
    let found = next_process(&rig.storage, &memory, &mut Rng::with_seed(3));
    let (replayed, bytes) = found.unwrap();
    assert_eq!(replayed, 3);
    for cluster in 0..4 {
        let bytes = &bytes[(cluster * CLUSTER) as usize..][..CLUSTER as usize];
        assert!(bytes[..4096].iter().all(|&byte| byte == 3), "cluster {cluster}");
        assert!(bytes[4096..].iter().all(|&byte| byte == 0), "cluster {cluster}");
    }
}

#[test]
fn no_death_forgets_what_was_answered() {
    const SMALL: u64 = 4096;
    let mut all_replayed = 0;
    for seed in 0..8 {
        let mut random = Rng::with_seed(seed);
        let options = CreateOptions { cluster_size: SMALL, ..CreateOptions::new(64 * SMALL) };
        let rig = Rig::qcow2_by(seed, able(), options);
        let memory = with_log(&rig);
        rig.submit(write(63 * SMALL, 512, 7, FUA)).unwrap();
        let mut answered = 0;
        for cluster in 0..40 {
            let durability = if random.bool() { FUA } else { PLAIN };
            let task = rig.start(write(cluster * SMALL, 512, 7, durability));
            loop {
                if let Some(outcome) = task.output() {
                    outcome.unwrap();
                    break;
                }
                let counts = rig.storage.counts();
                while counts == rig.storage.counts() && rig.sim.step() {}
                let (replayed, bytes) =
                    next_process(&rig.storage, &memory, &mut random).expect("a clean image");
                all_replayed += replayed;
                for cluster in 0..63 {
                    let (written, rest) =
                        bytes[(cluster * SMALL) as usize..][..SMALL as usize].split_at(512);
                    let [is_new, is_old] =
                        [7, 0].map(|byte| written.iter().all(|&found| found == byte));
                    assert!(is_new && cluster <= answered || is_old && cluster >= answered);
                    assert!(rest.iter().all(|&byte| byte == 0), "cluster {cluster}");
                }
            }
            answered = cluster + 1;
        }
    }
    assert!(all_replayed > 0);
}
