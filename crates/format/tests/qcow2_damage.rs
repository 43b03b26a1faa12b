//! Images with flipped bytes: every operation ends, with an error that names a place or without one.
#![forbid(unsafe_code)]

mod common;

use blockhouse_core::{ByteRange, ErrorKind, Unmap};
use blockhouse_format::Intent;
use blockhouse_format::qcow2::{
    Access, CreateOptions, OpenOptions, Preallocation, Qcow2, Switch, check, create,
};
use blockhouse_sim::{Config, Latency, Report, Rng, Sim, SimDisk, for_seeds};
use common::{read, unmap, write};

const SIZE: u64 = 256 << 10;

fn config() -> Config {
    Config { latency: Latency::fixed(1, 1), ..Config::default() }
}

/// An image with data, zeros and holes.
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

async fn use_it(disk: SimDisk, access: Access) -> blockhouse_core::Result<()> {
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
