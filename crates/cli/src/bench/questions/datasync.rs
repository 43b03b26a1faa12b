//! `bench datasync`: 32 MiB overwritten from one end to the other in blocks of 4 KiB, one at a
//! time: with no durability, with a flush after each write, and with durability as a part of the
//! write.
//!
//! The benchmark measures the rate, and the number of requests that the device gets for each write.

use crate::bench::load::{Load, LoopSetup, Pattern, Work};
use crate::bench::rows::{Case, Cases, Cost, Variant};
use crate::bench::testbed::Testbed;

const BLOCK: usize = 4096;
const SPAN: u64 = 32 << 20;

/// The description on the page of results.
pub const ABOUT: &str = "Overwrites of 4 KiB from one end of 32 MiB to the other, one at a time: made durable by a \
    flush after each, made durable as a part of each write, and not durable at all. Beside the rate it \
    counts what the device gets for each write: on one with FUA a single request, elsewhere a write and a \
    flush.";

/// The compared methods of a write.
const METHODS: [(&str, Work); 3] = [
    ("write + flush", Work::WriteThenFlush),
    ("FUA", Work::DurableWrite),
    ("not durable", Work::Write),
];

/// The one case, on the best engine.
pub fn cases(testbed: &Testbed) -> Cases<'_> {
    let engine = testbed.engines()[0];
    let variants = METHODS.map(|(name, work)| {
        let load = Load {
            work,
            pattern: Pattern::Sequential,
            block: BLOCK,
            depth: 1,
            jobs: 1,
            span: SPAN,
        };
        Variant {
            name: name.into(),
            run: Box::new(move || testbed.sample(LoopSetup::plain(engine), load)),
            published: None,
            cost: Cost::of(load),
        }
    });
    let name = format!("overwrite 32 MiB by 4K, {engine}");
    Cases::all([Case { name, variants: variants.into() }])
}
