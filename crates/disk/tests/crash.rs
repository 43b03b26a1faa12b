//! Crashes at every point of random workloads on a disk: nothing that was acknowledged as durable is
//! lost, no read sees what it must not, nobody waits for ever.

use std::future::Future;

use blockhouse_core::{Durability, Request, Result, Storage};
use blockhouse_disk::{Disk, Options};
use blockhouse_sim::{Rng, SimDisk, Subject, Workload, explore, for_seeds};

/// A disk over a raw image, as exports see it.
struct Served<S: Storage> {
    disk: Disk<S>,
    options: Options,
}

impl<S: Storage> Served<S> {
    fn new(storage: S, random: &mut Rng) -> Self {
        let durability = match random.u8(..4) {
            0 => Durability::Data,
            _ => Durability::None,
        };
        let options = Options { durability, ..Options::default() };
        let disk = Disk::raw(storage, options).expect("a size of whole sectors");
        Self { disk, options }
    }
}

impl<S: Storage> Subject for Served<S> {
    fn submit(&self, request: Request) -> impl Future<Output = Result<()>> {
        self.disk.submit(request)
    }

    fn least_durability(&self) -> Durability {
        self.options.durability
    }

    fn recover(&self, image: Vec<u8>) -> std::result::Result<Vec<u8>, String> {
        Ok(image)
    }
}

#[test]
fn crash_at_every_point() {
    let report = for_seeds(env!("CARGO_PKG_NAME"), "crash_at_every_point", 10_000, |seed| {
        explore(seed, &Workload::default(), |disk: SimDisk, random| Served::new(disk, random))
    });
    println!("{report:?}");
}
