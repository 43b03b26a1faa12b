//! Crashes at every point of random workloads on a disk: nothing that was acknowledged as durable
//! is lost, no read sees what it must not, no task waits for ever.

use std::future::Future;

use blockhouse_core::{Durability, Request, Result};
use blockhouse_disk::{Disk, Options};
use blockhouse_sim::{ImageState, Rng, SimDisk, SystemUnderTest, Workload, explore, for_seeds};

use crate::storages::{Lie, Lying};

/// A disk over a raw image, as exports see it.
struct Served {
    disk: Disk<SimDisk>,
    options: Options,
}

impl Served {
    fn new(storage: SimDisk, random: &mut Rng) -> Self {
        let durability = match random.u8(..4) {
            0 => Durability::Data,
            _ => Durability::None,
        };
        let options = Options { durability, ..Options::default() };
        let disk = Disk::raw(storage, options).expect("a size of whole sectors");
        Self { disk, options }
    }
}

impl SystemUnderTest for Served {
    fn others(&self) -> Vec<SimDisk> {
        Vec::new()
    }

    fn submit(&self, request: Request) -> impl Future<Output = Result<()>> {
        self.disk.submit(request)
    }

    fn size(&self) -> u64 {
        self.disk.size()
    }

    fn min_durability(&self) -> Durability {
        self.options.durability
    }

    fn grow(&self, size: u64) -> impl Future<Output = Result<()>> {
        self.disk.resize(size)
    }

    fn close(&self) -> impl Future<Output = Result<()>> {
        self.disk.close()
    }

    fn recover(&self, image: Vec<u8>, _state: ImageState) -> std::result::Result<Vec<u8>, String> {
        Ok(image)
    }
}

#[test]
fn crash_at_every_point() {
    for_seeds(env!("CARGO_PKG_NAME"), "crash_at_every_point", 20_000, |seed| {
        explore(seed, &Workload::default(), Served::new)
    });
}

#[test]
fn a_seed_says_the_same_twice() {
    let run = |seed| explore(seed, &Workload::default(), Served::new);
    for seed in 0..300 {
        assert_eq!(run(seed), run(seed), "seed {seed}");
    }
}

/// Whether the exploration finds out about `lie` within this many seeds.
fn is_caught(lie: Lie, seeds: u64) -> bool {
    (0..seeds).any(|seed| {
        let build =
            |disk, random: &mut Rng| Served::new(SimDisk::wrapping(Lying { disk, lie }), random);
        explore(seed, &Workload::default(), build).is_err()
    })
}

#[test]
fn storages_that_lie_are_found_out() {
    for (lie, seeds) in [
        (Lie::DurableWrites, 100),
        (Lie::Flushes, 100),
        (Lie::NoCache, 100),
        (Lie::FlushesSucceed, 1_000),
        (Lie::ShortZeroes, 1_000),
    ] {
        assert!(is_caught(lie, seeds), "{lie:?} went unnoticed for {seeds} seeds");
    }
}
