//! `bench fua`: a durable write as one request, against a write and then a flush.

use blockhouse_engine::Engine;

use super::load::{Load, Pattern, Work};
use super::rows::{Case, Published, Variant};
use super::{Bench, Plan};

const BLOCK: usize = 4096;

/// Depth, jobs, and what was published of write + flush and of FUA in IOPS (virtio-blk, write-through,
/// NVMe, 4 KiB).
const SHAPES: [(usize, usize, Option<(f64, f64)>); 4] = [
    (1, 1, Some((45_600.0, 56_100.0))),
    (1, 16, Some((183_300.0, 236_000.0))),
    (16, 1, Some((258_400.0, 311_100.0))),
    (64, 1, None),
];

/// How long it takes.
pub fn plan(engines: usize) -> Plan {
    let slices = SHAPES.len() * 2 * engines;
    Plan::of_slices(slices, slices, BLOCK)
}

/// The cases.
pub fn cases<'a>(bench: &'a Bench) -> Vec<Case<'a>> {
    let shapes = SHAPES.into_iter();
    shapes.flat_map(|shape| bench.engines.iter().map(move |&one| case(bench, one, shape))).collect()
}

fn case<'a>(
    bench: &'a Bench,
    engine: Engine,
    (depth, jobs, published): (usize, usize, Option<(f64, f64)>),
) -> Case<'a> {
    let span = bench.disk.size().min(super::DISK_SIZE);
    let variant = |name: &str, work, published: Option<f64>| {
        let load = Load { work, pattern: Pattern::Random, block: BLOCK, depth, jobs, span };
        Variant {
            name: name.into(),
            run: Box::new(move || bench.slice(engine, load)),
            published: published.map(|value| Published { value, unit: "IOPS" }),
        }
    };
    Case {
        name: format!("write 4K, depth {depth} x {jobs}, {engine}"),
        variants: vec![
            variant("write + flush", Work::WriteThenFlush, published.map(|both| both.0)),
            variant("FUA", Work::DurableWrite, published.map(|both| both.1)),
        ],
    }
}
