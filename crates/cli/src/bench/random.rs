//! `bench random`: small reads and writes here and there, one at a time and many, per engine.
//!
//! The engines are compared with the first that this machine has.

use anyhow::Result;

use super::load::{Load, Pattern, Work};
use super::rows::{Case, Variant};
use super::{Bench, Plan};

const BLOCK: usize = 4096;

/// What is done, and how many at a time.
const SHAPES: [(&str, Work, usize); 4] = [
    ("read 4K, depth 1", Work::Read, 1),
    ("read 4K, depth 32", Work::Read, 32),
    ("write 4K, depth 1", Work::Write, 1),
    ("write 4K, depth 32", Work::Write, 32),
];

/// How long it takes.
pub fn plan(engines: usize) -> Plan {
    let writes = SHAPES.iter().filter(|(_, work, _)| *work == Work::Write).count() * engines;
    Plan::of_slices(SHAPES.len() * engines, writes, BLOCK)
}

/// The cases.
pub fn cases<'a>(bench: &'a Bench) -> Vec<Case<'a>> {
    SHAPES.map(|(name, work, depth)| case(bench, name, work, depth)).into()
}

fn case<'a>(bench: &'a Bench, name: &str, work: Work, depth: usize) -> Case<'a> {
    let span = bench.disk.size().min(super::DISK_SIZE);
    let load = Load { work, pattern: Pattern::Random, block: BLOCK, depth, jobs: 1, span };
    let variants = bench.engines.iter().map(|&engine| Variant {
        name: engine.to_string(),
        run: Box::new(move || -> Result<_> { bench.slice(engine, load) }),
        published: None,
    });
    Case { name: name.into(), variants: variants.collect() }
}
