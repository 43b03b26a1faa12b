//! Images with flipped bytes: every operation ends, with an error that names a place or without
//! one.

use std::time::Duration;

use blockhouse_core::{ByteRange, Error, ErrorKind, Result, Unmap};
use blockhouse_format::Intent;
use blockhouse_format::qcow2::{
    Access, CheckReport, CreateOptions, NewSnapshot, OpenOptions, Preallocation, Preparation,
    Qcow2, SnapshotPlan, Switch, check, create,
};
use blockhouse_sim::{Config, Latency, Report, Rng, Sim, SimDisk, for_seeds};

use crate::common::{read, unmap, write};

const SIZE: u64 = 256 << 10;

fn config() -> Config {
    Config { latency: Latency::fixed(1, 1), ..Config::default() }
}

/// An image with data, zeros and holes, and maybe a snapshot.
fn whole_image(random: &mut Rng) -> Vec<u8> {
    let cluster_size = [512, 4096, 16_384][random.usize(..3)];
    let switch = |on| if on { Switch::On } else { Switch::Off };
    let options = CreateOptions {
        cluster_size,
        extended_l2: switch(cluster_size == 16_384 && random.bool()),
        lazy_refcounts: switch(random.bool()),
        preallocation: [Preallocation::Off, Preallocation::Metadata][random.usize(..2)],
        ..CreateOptions::new(SIZE)
    };
    let has_snapshot = random.bool();
    let sim = Sim::new(0);
    let disk = SimDisk::new(&sim, config(), Vec::new());
    let made = disk.clone();
    sim.block_on(async move {
        create(&made, &options).await.unwrap();
        let image = Qcow2::open(made, OpenOptions::default()).await.unwrap();
        write(&image, 0, &[1; 50_000], 0).await.unwrap();
        write(&image, 100_352, &[2; 30_720], 0).await.unwrap();
        let zeros = ByteRange::between(16_384, 40_960);
        unmap(&image, zeros, Intent::Zero(Unmap::Allowed), 0).await.unwrap();
        if has_snapshot {
            let name = "zero".to_owned();
            let new = NewSnapshot { name, created: Duration::ZERO, vm_clock: Duration::ZERO };
            image.snapshots().create(&new, None).await.unwrap();
            write(&image, 8192, &[3; 20_480], 0).await.unwrap();
        }
        image.close().await.unwrap();
    });
    disk.content()
}

/// Flips a few bytes, mostly of tables: those have zeros and small numbers all around.
fn damage(image: &mut [u8], random: &mut Rng) {
    for _ in 0..random.usize(1..=6) {
        let at = match random.u8(..3) {
            0 => random.usize(..112),
            1 => random.usize(..image.len() / 512) * 512 + random.usize(..16),
            _ => random.usize(..image.len()),
        };
        image[at] = match random.u8(..4) {
            0 => 0,
            1 => 0xff,
            2 => image[at] ^ 1 << random.u8(..8),
            _ => random.u8(..),
        };
    }
}

async fn use_it(disk: SimDisk, access: Access) -> Result<()> {
    let image = Qcow2::open(disk, OpenOptions { access, ..OpenOptions::default() }).await?;
    let size = image.size().min(4 * SIZE);
    check(&image).await?;
    let mut worst = Ok(());
    for offset in (0..size).step_by(32_768) {
        let part = ByteRange::between(offset, (offset + 32_768).min(size));
        worst = worst.and(read(&image, part, 0).await.map(|_| ()));
        if access == Access::ReadWrite {
            worst = worst.and(write(&image, offset, &[7; 512], 0).await);
            let zeroed = unmap(&image, part, Intent::Zero(Unmap::Allowed), 0).await;
            worst = worst.and(zeroed);
            worst = worst.and(unmap(&image, part, Intent::Discard, 0).await);
        }
    }
    worst.and(image.close().await)
}

/// A snapshot is taken, or one that the image has is deleted.
async fn any_plan(image: &Qcow2<SimDisk>, random: &mut Rng) -> Result<SnapshotPlan> {
    let name = "one".to_owned();
    let new = NewSnapshot { name, created: Duration::ZERO, vm_clock: Duration::ZERO };
    let there = image.snapshots().list().await?;
    Ok(match there.get(random.usize(..2)) {
        Some(snapshot) => SnapshotPlan::Delete(snapshot.name.clone()),
        None => SnapshotPlan::Create(new),
    })
}

/// Makes a change beside writes, which may hit its tables where refcounts are wrong.
async fn change_beside_writes(
    image: &Qcow2<SimDisk>,
    plan: SnapshotPlan,
    random: &mut Rng,
) -> Result<()> {
    let mut prepared = image.snapshots().prepare(plan.clone()).await?;
    for _ in 0..4 {
        if prepared.update(&|| false).await? == Preparation::AtOnce {
            drop(prepared);
            return match plan {
                SnapshotPlan::Create(new) => image.snapshots().create(&new, None).await.map(drop),
                SnapshotPlan::Delete(name) => image.snapshots().delete(&name).await,
            };
        }
        for _ in 0..random.usize(..8) {
            let offset = random.u64(..image.size().min(SIZE) / 512) * 512;
            write(image, offset, &[random.u8(..); 512], 0).await?;
        }
        if prepared.take(Duration::ZERO).await?.is_some() {
            break;
        }
    }
    Ok(())
}

/// Takes or deletes a snapshot of an image that may be damaged; whether that worked. Where a check
/// finds nothing wrong before it, all works, and a check finds nothing wrong after it.
async fn change_and_check(disk: SimDisk, random: &mut Rng) -> std::result::Result<bool, String> {
    let text = |error: Error| error.to_string();
    let Ok(image) = Qcow2::open(disk.clone(), OpenOptions::default()).await else {
        return Ok(false);
    };
    if image.size() < 512 {
        return Ok(false);
    }
    // A check looks at tables. Compressed data that cannot be decompressed fails the writes to a
    // part of it.
    let written = ByteRange::between(0, image.size().min(SIZE));
    let is_readable = read(&image, written, 0).await.is_ok();
    let is_sound = is_readable && check(&image).await.is_ok_and(|report| report.corruptions == 0);
    let outcome = match any_plan(&image, random).await {
        Ok(plan) => change_beside_writes(&image, plan, random).await,
        Err(error) => Err(error),
    };
    image.snapshots().give_back().await;
    let closed = image.close().await;
    if outcome.as_ref().is_err_and(|error| error.kind() == ErrorKind::Unsupported) {
        return Ok(false);
    }
    if is_sound {
        outcome.and(closed).map_err(text)?;
        let image = Qcow2::open(disk, OpenOptions::default()).await.map_err(text)?;
        let report = check(&image).await.map_err(text)?;
        return match report.corruptions {
            0 => Ok(true),
            _ => Err(format!("{report:?}")),
        };
    }
    Ok(outcome.is_ok())
}

/// A new image whose first L2 entry refers to `host`.
fn image_with_first_entry(host: u64) -> Vec<u8> {
    let sim = Sim::new(0);
    let disk = SimDisk::new(&sim, config(), Vec::new());
    let made = disk.clone();
    sim.block_on(async move {
        let options = CreateOptions { cluster_size: 512, ..CreateOptions::new(SIZE) };
        create(&made, &options).await.unwrap();
        let image = Qcow2::open(made, OpenOptions::default()).await.unwrap();
        write(&image, 0, &[1; 512], 0).await.unwrap();
        image.close().await.unwrap();
    });
    let mut bytes = disk.content();
    let word = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let l2 = (word(word(40) as usize) & !(1 << 63)) as usize;
    bytes[l2..l2 + 8].copy_from_slice(&(host | 1 << 63).to_be_bytes());
    bytes
}

async fn check_read_only(disk: SimDisk) -> CheckReport {
    let options = OpenOptions { access: Access::ReadOnly, ..OpenOptions::default() };
    check(&Qcow2::open(disk, options).await.unwrap()).await.unwrap()
}

#[test]
fn tables_are_neither_overwritten_nor_given_back_as_data_and_the_image_is_marked() {
    // Refcount table, refcount block, L1 table.
    for host in [512, 1024, 1536] {
        for intent in [Intent::Write, Intent::Zero(Unmap::Allowed), Intent::Discard] {
            let bytes = image_with_first_entry(host);
            let sim = Sim::new(0);
            let disk = SimDisk::new(&sim, config(), bytes.clone());
            let damaged = disk.clone();
            sim.block_on(async move {
                let image = Qcow2::open(damaged, OpenOptions::default()).await.unwrap();
                let error = image.map(ByteRange::between(0, 512), intent).await.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
                assert!(error.to_string().contains(&format!("offset {}", host)));
                assert!(image.map(ByteRange::between(512, 1024), Intent::Write).await.is_err());
                assert!(image.close().await.is_err(), "the image is not changed any more");
            });
            let mut marked = bytes;
            marked[79] |= 2;
            assert!(disk.content() == marked, "nothing but the corrupt bit is changed");
        }
    }
}

#[test]
fn a_table_that_many_refer_to_is_read_once() {
    let sim = Sim::new(0);
    let mut bytes = image_with_first_entry(4096);
    let count = 1000_u32;
    let l1 = bytes[40..48].to_vec();
    let table = bytes.len().next_multiple_of(512);
    bytes.resize(table, 0);
    for _ in 0..count {
        let mut snapshot = [0; 40];
        snapshot[..8].copy_from_slice(&l1);
        snapshot[8..12].copy_from_slice(&8_u32.to_be_bytes());
        bytes.extend_from_slice(&snapshot);
    }
    bytes[60..64].copy_from_slice(&count.to_be_bytes());
    bytes[64..72].copy_from_slice(&(table as u64).to_be_bytes());
    let disk = SimDisk::new(&sim, config(), bytes);
    let counted = disk.clone();
    let report = sim.block_on(check_read_only(disk));
    assert!(report.corruptions >= u64::from(count), "snapshots share a table: {report:?}");
    let (operations, _) = counted.counts();
    assert!(operations < u64::from(count) + 50, "{operations} operations");
}

#[test]
fn an_active_l1_table_that_is_an_l2_table_too_is_found_by_a_check() {
    let mut bytes = image_with_first_entry(0);
    let l1 = u64::from_be_bytes(bytes[40..48].try_into().unwrap());
    let first = l1 as usize;
    bytes[first..first + 8].copy_from_slice(&l1.to_be_bytes());
    let sim = Sim::new(0);
    let disk = SimDisk::new(&sim, config(), bytes);
    let report = sim.block_on(check_read_only(disk));
    let wanted = format!("the active L1 table at offset {l1} overlaps other data");
    assert!(report.problems.contains(&wanted), "{report:?}");
}

#[test]
fn damaged_images_end_in_errors_that_name_a_place() {
    let name = "damaged_images_end_in_errors_that_name_a_place";
    let report = for_seeds(env!("CARGO_PKG_NAME"), name, 3000, |seed| {
        let mut random = Rng::with_seed(seed);
        let mut image = whole_image(&mut random);
        damage(&mut image, &mut random);
        let access = [Access::ReadOnly, Access::ReadWrite][random.usize(..2)];
        let sim = Sim::new(seed);
        let disk = SimDisk::new(&sim, config(), image);
        let outcome = sim.block_on(use_it(disk, access));
        let failed = u64::from(outcome.is_err());
        if let Err(error) = outcome {
            let is_expected = matches!(
                error.kind(),
                ErrorKind::Corrupt | ErrorKind::Unsupported | ErrorKind::NoSpace
            );
            if !is_expected || !error.to_string().contains("offset") {
                return Err(format!("{error:?}"));
            }
        }
        Ok(Report { requests: 1, failed, ..Report::default() })
    });
    assert!(report.failed > 0, "none of {report:?} was damaged enough to matter");
}

#[test]
fn snapshots_of_damaged_images_change_or_are_refused() {
    let name = "snapshots_of_damaged_images_change_or_are_refused";
    let report = for_seeds(env!("CARGO_PKG_NAME"), name, 2000, |seed| {
        let mut random = Rng::with_seed(seed);
        let mut image = whole_image(&mut random);
        damage(&mut image, &mut random);
        let sim = Sim::new(seed);
        let disk = SimDisk::new(&sim, config(), image);
        let taken = sim.block_on(async move { change_and_check(disk, &mut random).await })?;
        Ok(Report { requests: 1, failed: u64::from(!taken), ..Report::default() })
    });
    assert!(report.failed > 0, "none of {report:?} was damaged enough to matter");
}
