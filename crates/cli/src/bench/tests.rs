//! The rows tell the truth: a storage of known latency, and ratios where arithmetic says.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use blockhouse_core::{
    Alignment, ByteRange, Capabilities, Durability, Fua, GroupCommit, IoVector, Offload, Status,
    Storage, Sync, Unmap, WriteCache,
};
use blockhouse_disk::{Disk, Options};
use blockhouse_engine::{Engine, sleep};

use super::load::{Limits, Load, Pattern, Work, measure};
use super::rows::{Case, Row, Variant, run_case};
use super::stop::Stop;

/// Takes its time, and stores nothing.
struct Slow {
    write: Duration,
    durable_write: Duration,
    flush: Duration,
}

impl Storage for Slow {
    fn name(&self) -> &str {
        "slow"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            fua: Fua::Native,
            write_cache: WriteCache::Volatile,
            group_commit: GroupCommit::Never,
            alignment: Alignment::BYTE,
            write_zeroes: Offload::Unavailable,
            discard: Offload::Unavailable,
        }
    }

    fn size(&self) -> u64 {
        1 << 20
    }

    async fn read(&self, _: u64, _: IoVector) -> blockhouse_core::Result<()> {
        sleep(self.write).await;
        Ok(())
    }

    async fn write(&self, _: u64, _: IoVector, how: Durability) -> blockhouse_core::Result<()> {
        sleep(if how == Durability::None { self.write } else { self.durable_write }).await;
        Ok(())
    }

    async fn write_zeroes(&self, _: ByteRange, _: Unmap) -> blockhouse_core::Result<()> {
        unreachable!("it says that it cannot")
    }

    async fn discard(&self, _: ByteRange) -> blockhouse_core::Result<()> {
        unreachable!("it says that it cannot")
    }

    async fn flush(&self, _: Sync) -> blockhouse_core::Result<()> {
        sleep(self.flush).await;
        Ok(())
    }

    async fn resize(&self, _: u64) -> blockhouse_core::Result<()> {
        unreachable!("nobody resizes it")
    }

    async fn status(&self, range: ByteRange) -> blockhouse_core::Result<(Status, u64)> {
        Ok((Status::Data, range.length()))
    }

    async fn prefetch(&self, _: ByteRange) -> blockhouse_core::Result<()> {
        Ok(())
    }
}

/// Write + flush against another way, one request at a time.
fn rows_of(storage: Slow, other: Work) -> Result<Vec<Row>> {
    let disk = Arc::new(Disk::raw(storage, Options::default())?);
    let stop = Stop::default();
    let limits = Limits { time: Duration::from_secs(10), requests: 4 };
    let variant = |work| {
        let (disk, stop) = (&disk, &stop);
        let pattern = Pattern::Random;
        let load = Load { work, pattern, block: 4096, depth: 1, jobs: 1, span: 1 << 20 };
        let run = move || measure(disk, Engine::Threads, (load, limits), (None, stop));
        Variant { name: format!("{work:?}"), run: Box::new(run), published: None }
    };
    let variants = vec![variant(Work::WriteThenFlush), variant(other)];
    run_case("fua", Case { name: "slow".into(), variants }, 5, || {})
}

fn milliseconds(count: u64) -> Duration {
    Duration::from_millis(count)
}

#[test]
fn a_ratio_is_where_arithmetic_says() -> Result<()> {
    // 20 + 60 against 20 milliseconds.
    let storage =
        Slow { write: milliseconds(20), durable_write: milliseconds(20), flush: milliseconds(60) };
    let rows = rows_of(storage, Work::DurableWrite)?;
    let ratio = rows[1].ratio.expect("it is not the baseline");
    assert!((3.0..5.0).contains(&ratio.median) && !ratio.is_noise(), "{ratio:?}");
    for (row, expected) in rows.iter().zip([80e6, 20e6]) {
        let median = row.latency.value_at_quantile(0.5) as f64;
        assert!((expected..1.4 * expected).contains(&median), "{}: {median}", row.variant);
        assert_eq!(row.latency.len(), 5 * 4, "each request of each round is counted");
        assert!(row.rate * median < 1.1e9, "one at a time: {} of {median} ns", row.rate);
    }
    Ok(())
}

#[test]
fn an_optimisation_that_is_off_is_noise() -> Result<()> {
    // The durable write costs what write and flush cost together.
    let storage =
        Slow { write: milliseconds(20), durable_write: milliseconds(40), flush: milliseconds(20) };
    let rows = rows_of(storage, Work::DurableWrite)?;
    let ratio = rows[1].ratio.expect("it is not the baseline");
    assert!((0.85..1.15).contains(&ratio.median), "{ratio:?}");
    let storage =
        Slow { write: milliseconds(20), durable_write: milliseconds(20), flush: milliseconds(20) };
    let rows = rows_of(storage, Work::WriteThenFlush)?;
    let ratio = rows[1].ratio.expect("it is not the baseline");
    assert!(ratio.is_noise(), "the same against itself: {ratio:?}");
    Ok(())
}

#[test]
fn requests_in_flight_together_share_the_time() -> Result<()> {
    let wait = milliseconds(10);
    let storage = Slow { write: wait, durable_write: wait, flush: wait };
    let disk = Arc::new(Disk::raw(storage, Options::default())?);
    let load = Load {
        work: Work::Read,
        pattern: Pattern::Sequential,
        block: 4096,
        depth: 8,
        jobs: 2,
        span: 1 << 20,
    };
    let limits = Limits { time: Duration::from_secs(10), requests: 160 };
    let slice = measure(&disk, Engine::Threads, (load, limits), (None, &Stop::default()))?;
    assert_eq!((slice.requests, slice.bytes), (160, 160 * 4096));
    // 16 at a time: ten times 10 ms, and not 160 times.
    assert!((milliseconds(100)..milliseconds(250)).contains(&slice.elapsed), "{:?}", slice.elapsed);
    Ok(())
}
