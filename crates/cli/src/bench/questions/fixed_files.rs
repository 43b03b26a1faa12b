//! `bench fixed-files`: small reads, 64 in flight, through a registered file of the ring and
//! through a file descriptor.
//!
//! Guarantee: right before a loop is measured, a probe checks whether its requests use the
//! registered file (`blockhouse_engine::probe_fixed_file`), and the result reports this.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use anyhow::Result;
use blockhouse_engine::{Engine, EventLoop, FixedFiles, PageCache, probe_fixed_file};
use blockhouse_images::CacheMode;

use crate::bench::load::{Load, LoopSetup, Pattern, Sample, Work};
use crate::bench::rows::{Case, Cases, Cost, Variant};
use crate::bench::testbed::{DISK_SIZE, Testbed};

const BLOCK: usize = 4096;
const DEPTH: usize = 64;
/// More threads would only compete for the disk.
const MAX_THREADS: usize = 4;
/// The text for the page of results.
pub const ABOUT: &str = "io_uring takes a reference to the file for every request, unless the file is in the ring's \
    own table. Reads of 4 KiB at random, 64 at a time on each thread, by the descriptor and by the slot. \
    Before each sample every measured loop is probed: the descriptor's number is made to name another file, \
    and a read by the slot must still return the right one.";

/// The cases: one thread, and several.
pub fn cases(testbed: &Testbed) -> Cases<'_> {
    if !testbed.engines().contains(&Engine::IoUring) {
        return Cases::none("only rings have such a table, and io_uring cannot be used here");
    }
    let several = std::thread::available_parallelism().map_or(2, usize::from);
    let sample = |load, fixed| sample(testbed, load, fixed);
    Cases::all([1, several.clamp(2, MAX_THREADS)].map(|jobs| case(jobs, sample)))
}

/// The case of `jobs` threads; `sample` measures each variant.
pub fn case<'a>(
    jobs: usize,
    sample: impl Fn(Load, FixedFiles) -> Result<Sample> + Copy + 'a,
) -> Case<'a> {
    let variant = |name: &str, fixed| {
        let load = Load {
            work: Work::Read,
            pattern: Pattern::Random,
            block: BLOCK,
            depth: DEPTH,
            jobs,
            span: DISK_SIZE,
        };
        Variant {
            name: name.into(),
            run: Box::new(move || sample(load, fixed)),
            published: None,
            cost: Cost::of(load),
        }
    };
    let threads = if jobs == 1 { "thread" } else { "threads" };
    Case {
        name: format!("read 4K, depth {DEPTH}, {jobs} {threads}"),
        variants: vec![
            variant("by descriptor", FixedFiles::Off),
            variant("by slot", FixedFiles::On),
        ],
    }
}

fn sample(testbed: &Testbed, load: Load, fixed: FixedFiles) -> Result<Sample> {
    let by_slot = AtomicUsize::new(0);
    let cache = match testbed.cache() {
        CacheMode::None | CacheMode::Directsync => PageCache::Bypassed,
        _ => PageCache::Used,
    };
    let path = PathBuf::from(testbed.disk().name());
    let prepare = |event_loop: &mut EventLoop| {
        event_loop.set_fixed_files(fixed);
        let named = event_loop.block_on(probe_fixed_file(&path, cache))?;
        by_slot.fetch_add(usize::from(named == FixedFiles::On), Relaxed);
        Ok(())
    };
    let mut sample =
        testbed.sample(LoopSetup { engine: Engine::IoUring, prepare: Some(&prepare) }, load)?;
    sample.note = Some(note(fixed, by_slot.into_inner(), load.jobs));
    Ok(sample)
}

/// The note on a sample in which `by_slot` of `jobs` loops used the registered file.
fn note(fixed: FixedFiles, by_slot: usize, jobs: usize) -> String {
    match (fixed, by_slot) {
        (FixedFiles::On, count) if count == jobs => {
            "in force: with another file under the descriptor's number, reads still met this one".into()
        }
        (FixedFiles::On, 0) => {
            "NOT in force: reads here go past the ring's table (as on tmpfs, or with a kernel before \
             5.19), so this compares the same with the same"
                .into()
        }
        (FixedFiles::Off, 0) => {
            "as wanted: with another file under the descriptor's number, reads met that one".into()
        }
        (_, count) => format!("unclear: {count} of {jobs} loops went by the slot"),
    }
}
