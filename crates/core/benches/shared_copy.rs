//! The cost of a copy out of a guest's memory, beside a plain one.
//!
//! `cargo bench -p blockhouse-core --bench shared_copy`. One line for each length and alignment:
//! the best of many passes, in nanoseconds for a copy and GB/s, for `memcpy` and for
//! `copy_from_shared`.
#![allow(clippy::print_stdout, reason = "the table is for the person who asked for it")]

use std::time::Instant;

use blockhouse_core::{Buffer, copy_from_shared};

/// Bytes that each pass copies.
const PASS: usize = 64 << 20;
const PASSES: usize = 15;
const LENGTHS: [usize; 5] = [16, 512, 4096, 64 << 10, 1 << 20];
/// Offsets of source and target in their pages. The last is where `rep movsb` is slow on Zen 3.
const OFFSETS: [(usize, usize); 3] = [(0, 0), (1, 0), (0, 16)];

fn plain(source: &[u8], target: &mut [u8]) {
    target.copy_from_slice(source);
}

fn shared(source: &[u8], target: &mut [u8]) {
    // SAFETY: two slices of one length, and nothing else accesses them.
    unsafe { copy_from_shared(source.as_ptr(), target.as_mut_ptr(), source.len()) };
}

/// Nanoseconds of the fastest pass, for one copy.
fn best(copy: impl Fn(&[u8], &mut [u8]), source: &[u8], target: &mut [u8]) -> f64 {
    let copies = (PASS / source.len()).min(500_000);
    let passes = (0..PASSES).map(|_| {
        let start = Instant::now();
        for _ in 0..copies {
            copy(std::hint::black_box(source), std::hint::black_box(target));
        }
        start.elapsed().as_nanos() as f64 / copies as f64
    });
    passes.fold(f64::MAX, f64::min)
}

fn main() {
    let (mut source, mut target) = (Buffer::new(2 << 20), Buffer::new(2 << 20));
    source.bytes_mut().fill(1);
    target.bytes_mut().fill(2);
    println!("  bytes  from  to      memcpy                 shared");
    for length in LENGTHS {
        for (from, to) in OFFSETS {
            let source = &source.bytes()[from..from + length];
            let target = &mut target.bytes_mut()[to..to + length];
            let (plain, shared) = (best(plain, source, target), best(shared, source, target));
            let speed = |time| length as f64 / time;
            println!(
                "{length:7} {from:5} {to:3}  {plain:9.1} ns {:5.1} GB/s  {shared:9.1} ns {:5.1} GB/s",
                speed(plain),
                speed(shared)
            );
        }
    }
}
