//! The rows on a simulated clock, so that a ratio is an exact number and not a range.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use anyhow::Result;
use blockhouse_core::WriteCache;
use blockhouse_disk::{Disk, Options};
use blockhouse_engine::FixedFiles;
use blockhouse_sim::{Config, Latency, Sim, SimDisk};
use futures_util::future::try_join_all;

use super::super::load::{
    Clocks, End, Limits, Load, Pattern, Sample, Shared, Work, new_histogram, one_job,
};
use super::super::questions::fixed_files;
use super::super::rows::{Case, Cost, Ratio, Row, Variant, run_case};
use super::super::stop::Stop;

const SPAN: u64 = 1 << 20;
const ROUNDS: usize = 5;

/// One sample of a load, on a simulated disk.
fn sample(load: Load, latency: Latency, requests: u64) -> Result<Sample> {
    let sim = Sim::new(1);
    let config = Config { latency, write_cache: WriteCache::Volatile, ..Config::default() };
    let storage = SimDisk::new(&sim, config, vec![0; SPAN as usize]);
    let disk = Disk::raw(storage, Options::default())?;
    let clock = sim.clock().clone();
    sim.block_on(async move {
        let clock = || clock.now();
        let limits = Limits { time: Duration::from_secs(3600), requests };
        let (load, stop) = (Load { span: SPAN, ..load }, Stop::default());
        let (begun, disk) = (AtomicU64::new(0), &disk);
        let shared = Shared { disk, load, limits, begun, clock: &clock, stop: &stop };
        let clocks = Clocks::start(None, &clock);
        let mut all = new_histogram();
        for latency in try_join_all((0..load.jobs).map(|job| one_job(&shared, job))).await? {
            all.add(latency)?;
        }
        let bytes = all.len() * load.block as u64;
        Ok(clocks.end(End::now(&clock), bytes, all))
    })
}

/// Write + flush against another way, one request at a time. The disk takes 20 us for a write and
/// 60 more for a flush or FUA; each round is slower by some factor, as on a shared machine.
fn rows_against(other: Work) -> Result<Vec<Row>> {
    let variant = |work| {
        let round = Rc::new(Cell::new(0));
        let load =
            Load { work, pattern: Pattern::Random, block: 4096, depth: 1, jobs: 1, span: SPAN };
        let run = move || {
            let slower = [1, 3, 2, 7, 4][round.replace(round.get() + 1)];
            sample(load, Latency::fixed(20 * slower, 60 * slower), 10)
        };
        let (name, cost) = (format!("{work:?}"), Cost::default());
        Variant { name, run: Box::new(run), published: None, cost }
    };
    let variants = vec![variant(Work::WriteThenFlush), variant(other)];
    let end = Instant::now() + Duration::from_secs(3600);
    run_case("fua", Case { name: "simulated".into(), variants }, (ROUNDS, end), || {})
}

fn assert_ratio(found: Option<Ratio>, expected: f64) {
    let ratio = found.expect("it is not the baseline");
    for value in [ratio.median, ratio.low, ratio.high] {
        assert!((value - expected).abs() < 1e-9, "{ratio:?}, and not {expected}");
    }
    assert_eq!(ratio.rounds, ROUNDS);
}

#[test]
fn what_costs_a_quarter_is_four_times_as_fast_in_each_round() -> Result<()> {
    let rows = rows_against(Work::Write)?;
    assert_ratio(rows[1].ratio, 4.0);
    assert!(!rows[1].ratio.is_some_and(Ratio::is_noise));
    // The round in the middle is three times as slow as the first.
    for (row, microseconds) in rows.iter().zip([240.0, 60.0]) {
        assert!((row.rate * microseconds - 1e6).abs() < 1e-3, "{}: {}", row.variant, row.rate);
        assert_eq!(row.latency.len(), ROUNDS as u64 * 10);
        let median = row.latency.value_at_quantile(0.5) as f64;
        assert!((median / (1000.0 * microseconds) - 1.0).abs() < 1e-3, "{}: {median}", row.variant);
    }
    Ok(())
}

#[test]
fn fua_that_costs_what_write_and_flush_cost_is_noise() -> Result<()> {
    let rows = rows_against(Work::DurableWrite)?;
    assert_ratio(rows[1].ratio, 1.0);
    assert!(rows[1].ratio.is_some_and(Ratio::is_noise));
    Ok(())
}

/// The case of `bench fixed-files`, where a read takes this many microseconds by the descriptor and
/// by the slot.
fn fixed_files(jobs: usize, by_descriptor: u64, by_slot: u64) -> Result<Vec<Row>> {
    let measured = |load, fixed| {
        let latency = if fixed == FixedFiles::On { by_slot } else { by_descriptor };
        sample(load, Latency::fixed(latency, 1), 640)
    };
    let end = Instant::now() + Duration::from_secs(3600);
    run_case("fixed-files", fixed_files::case(jobs, measured), (ROUNDS, end), || {})
}

#[test]
fn fixed_files_that_are_not_in_force_are_noise() -> Result<()> {
    for jobs in [1, 2] {
        let rows = fixed_files(jobs, 100, 100)?;
        assert_ratio(rows[1].ratio, 1.0);
        assert!(rows[1].ratio.is_some_and(Ratio::is_noise));
    }
    Ok(())
}

#[test]
fn fixed_files_that_save_a_fifth_are_a_quarter_faster() -> Result<()> {
    for jobs in [1, 2] {
        let rows = fixed_files(jobs, 100, 80)?;
        assert_eq!((&*rows[0].variant, &*rows[1].variant), ("by descriptor", "by slot"));
        assert_ratio(rows[1].ratio, 1.25);
        assert!(!rows[1].ratio.is_some_and(Ratio::is_noise));
        // Each job has 64 requests in flight.
        let least = 0.8 * 64.0 * jobs as f64 / 100e-6;
        assert!(rows[0].rate > least, "{} and not {least}", rows[0].rate);
    }
    Ok(())
}

#[test]
fn the_time_of_a_sample_is_kept_by_its_own_clock() -> Result<()> {
    let load = Load {
        work: Work::Read,
        pattern: Pattern::Sequential,
        block: 4096,
        depth: 1,
        jobs: 1,
        span: SPAN,
    };
    let hour = Duration::from_secs(3600);
    // Reads of a second each, in virtual time: the hour passes at once.
    let sample = sample(load, Latency::fixed(1_000_000, 1), u64::MAX)?;
    assert_eq!((sample.requests, sample.elapsed), (3600, hour));
    Ok(())
}
