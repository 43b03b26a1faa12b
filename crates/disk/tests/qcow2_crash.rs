//! Crashes at every point of random workloads on qcow2 images: no image is corrupt, nothing that was
//! acknowledged as durable is lost, no read sees what it must not, nobody waits for ever.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::future::Future;
use std::sync::Arc;

use blockhouse_core::{Alignment, Buffer, Durability, Fua, Request, Result};
use blockhouse_disk::{Access, Disk, Options};
use blockhouse_format::qcow2::{self, Backing, CreateOptions, Qcow2, Switch};
use blockhouse_sim::{Config, Rng, Sim, SimDisk, Subject, Workload, explore_image, for_seeds};

/// The kind of image.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Plain,
    /// Refcounts are written late.
    Lazy,
    /// What the guest had at the beginning is in another image behind.
    Backed,
    /// Clusters of 32 subclusters.
    Subclusters,
}

/// A disk over a qcow2 image, as exports see it.
struct Served {
    disk: Disk<SimDisk>,
    least: Durability,
    base: Option<Vec<u8>>,
}

/// A storage that does as it is told, for looking at images.
fn plain_config() -> Config {
    Config { alignment: Alignment::BYTE, fua: Fua::Emulated, ..Config::default() }
}

async fn open(storage: SimDisk, base: Option<SimDisk>, options: Options) -> Result<Disk<SimDisk>> {
    let disk = Disk::qcow2(storage, options).await?;
    let behind = Options { access: Access::ReadOnly, ..Options::default() };
    Ok(match base {
        Some(base) => disk.over(Arc::new(Disk::raw(base, behind)?)),
        None => disk,
    })
}

/// An image with that content, or over a file with that content.
fn image_of(content: &[u8], kind: Kind, block: u32, random: &mut Rng) -> Vec<u8> {
    let sizes = match kind {
        Kind::Subclusters => [16_384_u64, 16_384],
        _ => [512.max(u64::from(block)), 4096],
    };
    let backing = Backing { name: b"base".to_vec(), format: Some("raw".into()) };
    let options = CreateOptions {
        cluster_size: sizes[random.usize(..2)],
        refcount_bits: [1, 16, 64][random.usize(..3)],
        lazy_refcounts: if let Kind::Lazy = kind { Switch::On } else { Switch::Off },
        extended_l2: if let Kind::Subclusters = kind { Switch::On } else { Switch::Off },
        backing: if let Kind::Backed = kind { Some(backing) } else { None },
        ..CreateOptions::new(content.len() as u64)
    };
    let sim = Sim::new(random.u64(..));
    let storage = SimDisk::new(&sim, plain_config(), Vec::new());
    let (target, content) = (storage.clone(), content.to_vec());
    sim.block_on(async move {
        qcow2::create(&target, &options).await.expect("a new image");
        if options.backing.is_some() {
            return;
        }
        let disk = open(target, None, Options::default()).await.expect("the new image");
        let mut buffer = Buffer::new(content.len());
        buffer.bytes_mut().copy_from_slice(&content);
        let (from, durability) = (buffer.lend(), Durability::None);
        disk.submit(Request::Write { offset: 0, from, durability }).await.expect("room");
        disk.close().await.expect("no failure");
    });
    storage.content()
}

impl Subject for Served {
    fn submit(&self, request: Request) -> impl Future<Output = Result<()>> {
        self.disk.submit(request)
    }

    fn least_durability(&self) -> Durability {
        self.least
    }

    fn recover(&self, image: Vec<u8>) -> std::result::Result<Vec<u8>, String> {
        let sim = Sim::new(0);
        let storage = SimDisk::new(&sim, plain_config(), image);
        let base = self.base.clone().map(|base| SimDisk::new(&sim, plain_config(), base));
        sim.block_on(async move {
            // Opened for writing, so that refcounts that are late are repaired.
            let image = Qcow2::open(storage.clone(), qcow2::OpenOptions::default()).await;
            let image = image.map_err(|error| format!("cannot be opened: {error}"))?;
            let report = qcow2::check(&image).await.map_err(|error| error.to_string())?;
            if report.corruptions > 0 {
                return Err(format!("corrupt after a crash: {:?}", report.problems));
            }
            let disk = open(storage, base, Options::default()).await;
            let disk = disk.map_err(|error| format!("cannot be opened again: {error}"))?;
            let mut buffer = Buffer::new(disk.size() as usize);
            let read = Request::Read { offset: 0, into: buffer.lend() };
            disk.submit(read).await.map_err(|error| format!("cannot be read: {error}"))?;
            Ok(buffer.bytes().to_vec())
        })
    }
}

fn crash_at_every_point(test: &str, kind: Kind, seeds: u64) {
    for_seeds(env!("CARGO_PKG_NAME"), test, seeds, |seed| {
        let base = RefCell::new(None);
        let encode = |config: &Config, content: Vec<u8>, random: &mut Rng| {
            let image = image_of(&content, kind, config.alignment.offset, random);
            *base.borrow_mut() = matches!(kind, Kind::Backed).then_some(content);
            image
        };
        let build = |sim: &Sim, storage: SimDisk, random: &mut Rng| {
            let least = if random.u8(..4) == 0 { Durability::Data } else { Durability::None };
            let options = Options { durability: least, ..Options::default() };
            let base = base.borrow_mut().take();
            let behind = base.clone().map(|base| SimDisk::new(sim, plain_config(), base));
            let disk = sim.block_on(open(storage, behind, options)).expect("a good image");
            Served { disk, least, base }
        };
        explore_image(seed, &Workload::default(), encode, build)
    });
}

#[test]
fn crash_at_every_point_of_a_plain_image() {
    crash_at_every_point("crash_at_every_point_of_a_plain_image", Kind::Plain, 600);
}

#[test]
fn crash_at_every_point_with_lazy_refcounts() {
    crash_at_every_point("crash_at_every_point_with_lazy_refcounts", Kind::Lazy, 400);
}

#[test]
fn crash_at_every_point_over_a_backing_file() {
    crash_at_every_point("crash_at_every_point_over_a_backing_file", Kind::Backed, 600);
}

#[test]
fn crash_at_every_point_with_subclusters() {
    crash_at_every_point("crash_at_every_point_with_subclusters", Kind::Subclusters, 200);
}
