//! `bench datasync`: 32 MiB overwritten from one end to the other in blocks of 4 KiB, one at a time: with
//! no durability, with a flush after each write, and with durability as a part of the write.
//!
//! What counts beside the rate is how many requests the device gets for each write.

use crate::bench::load::{Load, LoopSetup, Pattern, Work};
use crate::bench::rows::{Case, Cases, Cost, Published, Unit, Variant};
use crate::bench::testbed::Testbed;

const BLOCK: usize = 4096;
const SPAN: u64 = 32 << 20;

/// For the page of results.
pub const ABOUT: &str = "Overwrites of 4 KiB from one end of 32 MiB to the other, one at a time: made durable by a \
    flush after each, made durable as a part of each write, and not durable at all. Beside the rate it \
    counts what the device gets for each write: on one with FUA a single request, elsewhere a write and a \
    flush.";

/// How it is done, and what was published of it: writes a second, and with what the device got.
const METHODS: [(&str, Work, f64, &str); 3] = [
    ("write + flush", Work::WriteThenFlush, 370.0, "22 s in all, 750 device requests/s"),
    ("FUA", Work::DurableWrite, 420.0, "19 s in all, 420 device requests/s"),
    ("not durable", Work::Write, 2173.0, "4 s in all"),
];

/// The one case, on the best engine.
pub fn cases(testbed: &Testbed) -> Cases<'_> {
    let engine = testbed.engines()[0];
    let variants = METHODS.map(|(name, work, value, detail)| {
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
            published: Some(Published { value, unit: Unit::RequestsPerSecond, detail }),
            cost: Cost::of(load),
        }
    });
    let name = format!("overwrite 32 MiB by 4K, {engine}");
    Cases::all([Case { name, variants: variants.into() }])
}
