//! `bench fua`: a durable write as one request, against a write and then a flush.

use blockhouse_engine::Engine;

use crate::bench::load::{Load, LoopSetup, Pattern, Work};
use crate::bench::rows::{Case, Cases, Cost, Published, Variant};
use crate::bench::testbed::{DISK_SIZE, Testbed};

const BLOCK: usize = 4096;

/// The text for the page of results.
pub const ABOUT: &str = "A guest whose write cache is off, or that sets FUA on a request, wants the data to \
    be on stable storage when the write completes. The usual emulation is a write and then a flush: two \
    requests in a row. Here the same blocks of 4 KiB are written at random either way, so many at a time \
    (depth × threads), on each engine. On a device without FUA the kernel puts a flush behind each such \
    write all the same; what is left to gain there is one way to the kernel instead of two.";

/// The queue depth of each job, and the number of jobs.
struct LoadShape {
    depth: usize,
    jobs: usize,
    /// Published IOPS of write + flush, and of FUA.
    published: Option<[f64; 2]>,
}

const SHAPES: [LoadShape; 4] = [
    LoadShape { depth: 1, jobs: 1, published: Some([45_600.0, 56_100.0]) },
    LoadShape { depth: 1, jobs: 16, published: Some([183_300.0, 236_000.0]) },
    LoadShape { depth: 16, jobs: 1, published: Some([258_400.0, 311_100.0]) },
    LoadShape { depth: 64, jobs: 1, published: None },
];
const PUBLISHED: &str = "QEMU commit 984a32f17e8d: a guest, directsync, NVMe";

/// The cases.
pub fn cases(testbed: &Testbed) -> Cases<'_> {
    let shapes = SHAPES.iter();
    Cases::all(
        shapes
            .flat_map(|shape| testbed.engines().iter().map(move |&one| case(testbed, one, shape))),
    )
}

fn case<'a>(testbed: &'a Testbed, engine: Engine, shape: &LoadShape) -> Case<'a> {
    let LoadShape { depth, jobs, published } = *shape;
    let variant = |name: &str, work, published: Option<f64>| {
        let load =
            Load { work, pattern: Pattern::Random, block: BLOCK, depth, jobs, span: DISK_SIZE };
        Variant {
            name: name.into(),
            run: Box::new(move || testbed.sample(LoopSetup::plain(engine), load)),
            published: published.map(|value| Published { value, detail: PUBLISHED }),
            cost: Cost::of(load),
        }
    };
    Case {
        name: format!("write 4K, depth {depth} x {jobs}, {engine}"),
        variants: vec![
            variant("write + flush", Work::WriteThenFlush, published.map(|both| both[0])),
            variant("FUA", Work::DurableWrite, published.map(|both| both[1])),
        ],
    }
}
