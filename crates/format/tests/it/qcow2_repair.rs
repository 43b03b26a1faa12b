//! Repairs that are interrupted: after a crash at every storage operation of a repair, a repair of
//! leaks has changed nothing that a guest reads and damaged nothing, and a repair of everything can
//! be made again and comes to the same disk.

use std::rc::Rc;
use std::time::Duration;

use blockhouse_core::ByteRange;
use blockhouse_format::qcow2::{
    Access, CheckReport, CreateOptions, NewSnapshot, OpenOptions, Qcow2, Repair, RepairReport,
    Switch, Version, check, create, repair,
};
use blockhouse_sim::{Config, Report, Rng, Sim, SimDisk, for_seeds};

use crate::common::{read, write};

const SIZE: u64 = 1 << 20;

/// Runs something on a disk of its own with this content.
fn on_disk<T: 'static, F: Future<Output = T> + 'static>(
    content: &[u8],
    work: impl FnOnce(SimDisk) -> F,
) -> (T, Vec<u8>) {
    let sim = Sim::new(0);
    let disk = SimDisk::new(&sim, Config::default(), content.to_vec());
    let outcome = sim.block_on(work(disk.clone()));
    (outcome, disk.content())
}

/// An image with data here and there.
fn whole_image(random: &mut Rng) -> Vec<u8> {
    let cluster_size = [512, 1024, 4096, 16_384][random.usize(..4)];
    let is_v2 = random.u8(..4) == 0;
    let options = CreateOptions {
        cluster_size,
        version: if is_v2 { Version::V2 } else { Version::V3 },
        refcount_bits: if is_v2 { 16 } else { [8, 16, 64][random.usize(..3)] },
        extended_l2: if !is_v2 && cluster_size == 16_384 && random.bool() {
            Switch::On
        } else {
            Switch::Off
        },
        ..CreateOptions::new(SIZE)
    };
    let parts: Vec<_> = (1..=random.u8(2..10))
        .map(|byte| {
            (random.u64(..SIZE / 8192) * 4096, vec![byte; random.usize(1..=64) * 4096], byte)
        })
        .collect();
    let (_, content) = on_disk(&[], |disk| async move {
        create(&disk, &options).await.unwrap();
        let image = Qcow2::open(disk, OpenOptions::default()).await.unwrap();
        for (offset, bytes, _) in &parts {
            write(&image, *offset, bytes, 0).await.unwrap();
        }
        image.close().await.unwrap();
    });
    content
}

fn be64(bytes: &[u8], at: u64) -> u64 {
    u64::from_be_bytes(bytes[at as usize..][..8].try_into().unwrap())
}

fn put(bytes: &mut [u8], at: u64, word: u64) {
    bytes[at as usize..][..8].copy_from_slice(&word.to_be_bytes());
}

/// Where the tables of an image are.
struct Places {
    l1: Vec<u64>,
    /// All words with an offset in L2 tables.
    l2: Vec<u64>,
    refcount_table: u64,
    blocks: Vec<u64>,
    cluster_size: u64,
}

impl Places {
    fn of(image: &[u8]) -> Self {
        const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
        let cluster_size = 1 << image[23];
        let is_extended = image[7] >= 3 && image[79] & 16 != 0;
        let step = if is_extended { 16 } else { 8 };
        let entries = u64::from(u32::from_be_bytes(image[36..40].try_into().unwrap()));
        let l1_offset = be64(image, 40);
        let used = |at: &u64| be64(image, *at) & OFFSET != 0;
        let l1: Vec<u64> = (0..entries).map(|index| l1_offset + index * 8).filter(used).collect();
        let l2 = l1.iter().flat_map(|&at| {
            let table = be64(image, at) & OFFSET;
            (table..table + cluster_size).step_by(step)
        });
        let l2 = l2.filter(used).collect();
        let refcount_table = be64(image, 48);
        let blocks = (refcount_table..refcount_table + cluster_size).step_by(8);
        let blocks = blocks.filter(used).map(|at| be64(image, at)).collect();
        Self { l1, l2, refcount_table, blocks, cluster_size }
    }

    /// Bytes of a refcount.
    fn width(&self, image: &[u8]) -> u64 {
        let order = if image[7] >= 3 { image[99] } else { 4 };
        (1 << order) / 8
    }

    /// Bytes of all refcounts of clusters of the file.
    fn counted(&self, image: &[u8]) -> u64 {
        (image.len() as u64).div_ceil(self.cluster_size) * self.width(image)
    }
}

fn any(of: &[u64], random: &mut Rng) -> u64 {
    of[random.usize(..of.len())]
}

/// Counts that are too high: leaks.
fn add_leaks(image: &mut [u8], random: &mut Rng) {
    let places = Places::of(image);
    for _ in 0..random.usize(1..=4) {
        // One that is free, or in use.
        let width = places.width(image);
        let cluster = random.u64(..places.counted(image).min(places.cluster_size) / width);
        let at = places.blocks[0] + cluster * width + width - 1;
        let raised = image[at as usize] + 1;
        // A reference that is not the only one by its count does not say that it is.
        if raised == 2 {
            clear_marks(image, &places, cluster);
        }
        image[at as usize] = raised;
    }
}

fn clear_marks(image: &mut [u8], places: &Places, cluster: u64) {
    for &at in places.l1.iter().chain(&places.l2) {
        let word = be64(image, at);
        let is_compressed = word >> 62 & 1 == 1;
        if !is_compressed && (word & !(1 << 63)) / places.cluster_size == cluster {
            put(image, at, word & !(1 << 63));
        }
    }
}

/// Words of tables that say something else.
fn add_corruption(image: &mut [u8], random: &mut Rng) {
    let places = Places::of(image);
    for _ in 0..random.usize(1..=4) {
        let data = any(&places.l2, random);
        let word = be64(image, data);
        match random.u8(..8) {
            0 => put(image, data, 1 << 63 | 1 << 40),
            1 => put(image, data, word ^ 1 << 63),
            2 => {
                let other = be64(image, any(&places.l2, random));
                put(image, data, other);
            }
            3 => put(image, data, word | 2),
            4 => put(image, any(&places.l1, random), 1 << 63 | 1 << 45),
            5 => put(image, places.refcount_table, 1 << 50),
            // Counts of clusters past the end of the file do not matter.
            6 => {
                let counted = places.counted(image).min(places.cluster_size);
                image[(places.blocks[0] + random.u64(..counted)) as usize] = random.u8(..);
            }
            _ => put(image, places.refcount_table, word & !(1 << 63)),
        }
    }
}

/// Repairs, and answers the disk's content too.
fn repaired(image: &[u8], what: Repair) -> Result<(RepairReport, Vec<u8>), String> {
    let (outcome, left) = on_disk(image, |disk| async move { repair(&disk, what).await });
    Ok((outcome.map_err(|error| format!("{what:?}: {error}"))?, left))
}

/// The report of a check and the guest's bytes.
fn seen(image: &[u8]) -> Result<(CheckReport, Vec<u8>), String> {
    let (outcome, _) = on_disk(image, |disk| async move {
        let options = OpenOptions { access: Access::ReadOnly, ..OpenOptions::default() };
        let image = Qcow2::open(disk, options).await?;
        let report = check(&image).await?;
        let bytes = read(&image, ByteRange::between(0, image.size()), 0).await?;
        Ok::<_, blockhouse_core::Error>((report, bytes))
    });
    outcome.map_err(|error| error.to_string())
}

/// Repairs with crashes at every operation, and shows each crash to `judge`.
fn with_crashes(
    seed: u64,
    image: Vec<u8>,
    what: Repair,
    judge: impl Fn(Vec<u8>) -> Result<(), String>,
) -> Result<Report, String> {
    let sim = Sim::new(seed);
    let mut random = sim.fork_prng();
    let config = Config { refuses_fua: false, ..Config::random(&mut random) };
    let block = u64::from(config.alignment.offset);
    if block > 1 << image[23] {
        return Ok(Report::default());
    }
    let disk = SimDisk::new(&sim, config, image);
    let mended = disk.clone();
    let task =
        sim.spawn(async move { repair(&mended, what).await.map_err(|error| error.to_string()) });
    let mut report = Report::default();
    let mut last = None;
    while sim.step() {
        let moment = disk.counts();
        if last.replace(moment) != Some(moment) {
            report.crashes += 1;
            judge(disk.crash(&mut random)).map_err(|why| format!("after a crash: {why}"))?;
        }
    }
    task.output().ok_or("the repair waits for ever")??;
    judge(disk.content())?;
    Ok(report)
}

/// An entry without the COPIED flag that it may have costs a copy, and nothing else.
fn is_harmless(problem: &str) -> bool {
    problem.ends_with("has refcount 1, but its COPIED flag is not set")
}

#[test]
fn leaks_are_repaired_without_any_danger() {
    let name = "leaks_are_repaired_without_any_danger";
    let report = for_seeds(env!("CARGO_PKG_NAME"), name, 120, |seed| {
        let mut random = Sim::new(seed).fork_prng();
        let mut image = whole_image(&mut random);
        let (_, bytes) = seen(&image)?;
        let bytes = Rc::new(bytes);
        add_leaks(&mut image, &mut random);
        let (report, _) = seen(&image)?;
        if report.corruptions > 0 || report.leaks == 0 {
            return Err(format!("leaks only are wanted here: {report:?}"));
        }
        let (done, left) = repaired(&image, Repair::Leaks)?;
        if done.left.leaks > 0 || done.left.corruptions > 0 || seen(&left)?.1 != *bytes {
            return Err(format!("not repaired: {done:?}"));
        }
        with_crashes(seed, image, Repair::Leaks, move |left| {
            let (report, found) = seen(&left)?;
            match report.problems.iter().find(|problem| !is_harmless(problem)) {
                Some(problem) => Err(format!("damage: {problem}")),
                None if found != *bytes => Err("the guest's data changed".into()),
                None => Ok(()),
            }
        })
    });
    eprintln!("{report:?}");
}

#[test]
fn corruption_is_repaired_and_a_repair_can_be_interrupted() {
    let name = "corruption_is_repaired_and_a_repair_can_be_interrupted";
    let report = for_seeds(env!("CARGO_PKG_NAME"), name, 120, |seed| {
        let mut random = Sim::new(seed).fork_prng();
        let mut image = whole_image(&mut random);
        add_corruption(&mut image, &mut random);
        let (done, left) = repaired(&image, Repair::All)?;
        if done.left.corruptions > 0 || done.left.leaks > 0 {
            return Err(format!("not repaired: {done:?}"));
        }
        let bytes = Rc::new(seen(&left)?.1);
        // Repaired clusters can be written again.
        let (written, left) = on_disk(&left, |disk| async move {
            let image = Qcow2::open(disk, OpenOptions::default()).await?;
            write(&image, 0, &vec![0xee; SIZE as usize], 0).await?;
            image.close().await
        });
        written.map_err(|error| format!("writing: {error}"))?;
        let (report, found) = seen(&left)?;
        let damage = report.problems.iter().find(|problem| !is_harmless(problem));
        if damage.is_some() || report.leaks > 0 || found.iter().any(|&byte| byte != 0xee) {
            return Err(format!("after writing: {report:?}"));
        }
        with_crashes(seed, image, Repair::All, move |left| {
            let (done, left) = repaired(&left, Repair::All)?;
            if done.left.corruptions > 0 || done.left.leaks > 0 {
                return Err(format!("not repaired: {done:?}"));
            }
            if seen(&left)?.1 != *bytes {
                return Err("another disk came out of it".into());
            }
            Ok(())
        })
    });
    eprintln!("{report:?}");
}

/// A snapshot without an L1 table, at an offset where none can be.
#[test]
fn a_snapshot_whose_empty_l1_table_has_an_invalid_offset_is_removed() {
    let (_, mut content) = on_disk(&[], |disk| async move {
        create(&disk, &CreateOptions::new(SIZE)).await.unwrap();
        let image = Qcow2::open(disk, OpenOptions::default()).await.unwrap();
        let (created, vm_clock) = (Duration::ZERO, Duration::ZERO);
        let new = NewSnapshot { name: "first".into(), created, vm_clock };
        image.snapshots().create(&new, None).await.unwrap();
        image.close().await.unwrap();
    });
    let snapshot = be64(&content, 64);
    for (offset, at_fault) in [(0, 0), (65_536, 0), (1, 1)] {
        put(&mut content, snapshot, offset);
        content[snapshot as usize + 8..][..4].fill(0);
        let (found, repaired) =
            on_disk(&content, |disk| async move { repair(&disk, Repair::All).await.unwrap() });
        assert_eq!(found.left.corruptions, 0, "{offset}: {:?}", found.left.problems);
        let (snapshots, _) = on_disk(&repaired, |disk| async move {
            let image = Qcow2::open(disk, OpenOptions::default()).await.unwrap();
            image.snapshots().list().await.unwrap().len()
        });
        assert_eq!(snapshots, 1 - at_fault, "{offset}");
    }
}
