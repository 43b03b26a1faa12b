//! `bench random`: small reads and writes at random offsets, at queue depths 1 and 32, per engine.
//!
//! The baseline is the first engine that this machine has.

use crate::bench::load::{Load, LoopSetup, Pattern, Work};
use crate::bench::rows::{Case, Cases, Cost, Variant};
use crate::bench::testbed::{DISK_SIZE, Testbed};

const BLOCK: usize = 4096;

/// The text for the page of results.
pub const ABOUT: &str = "Reads and writes of 4 KiB at random, one at a time and 32 at a time, on each engine that this machine \
    has; the others are compared with the first. The writes are not durable.";

/// Name, kind of work and queue depth of each case.
const SHAPES: [(&str, Work, usize); 4] = [
    ("read 4K, depth 1", Work::Read, 1),
    ("read 4K, depth 32", Work::Read, 32),
    ("write 4K, depth 1", Work::Write, 1),
    ("write 4K, depth 32", Work::Write, 32),
];

/// The cases.
pub fn cases(testbed: &Testbed) -> Cases<'_> {
    Cases::all(SHAPES.map(|(name, work, depth)| case(testbed, name, work, depth)))
}

fn case<'a>(testbed: &'a Testbed, name: &str, work: Work, depth: usize) -> Case<'a> {
    let load =
        Load { work, pattern: Pattern::Random, block: BLOCK, depth, jobs: 1, span: DISK_SIZE };
    let variants = testbed.engines().iter().map(|&engine| Variant {
        name: engine.to_string(),
        run: Box::new(move || testbed.sample(LoopSetup::plain(engine), load)),
        published: None,
        cost: Cost::of(load),
    });
    Case { name: name.into(), variants: variants.collect() }
}
