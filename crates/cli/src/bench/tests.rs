//! The rows are correct: on a storage of known latency the ratios are the computed ones.

mod exact;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use anyhow::Result;
use blockhouse_core::{
    Alignment, Allocation, ByteRange, Capabilities, Durability, IoVector, Storage, SyncMode, Unmap,
};
use blockhouse_disk::{Disk, ImageFormat, Options};
use blockhouse_engine::{Engine, EngineChoice, EventLoop, sleep};
use blockhouse_format::qcow2;
use blockhouse_sim::PLAIN_CAPABILITIES;

use super::load::{Limits, Load, LoopSetup, Pattern, Work, measure};
use super::questions::vmstate::{self, Storing};
use super::questions::wakeup::{self, UNRELATED_TIMER, WakeUp};
use super::rows::{Case, Cost, Row, Variant, run_case};
use super::stop::Stop;

/// A storage in memory, with a given latency.
struct Slow {
    /// The latency of writes, and of reads.
    write: Duration,
    durable_write: Duration,
    flush: Duration,
    alignment: Alignment,
    content: Mutex<Vec<u8>>,
    /// Reads, writes and flushes so far.
    operations: Arc<AtomicU64>,
}

impl Slow {
    fn new(write: u64, durable_write: u64, flush: u64) -> Self {
        Self {
            write: milliseconds(write),
            durable_write: milliseconds(durable_write),
            flush: milliseconds(flush),
            alignment: Alignment::BYTE,
            content: Mutex::new(vec![0; 1 << 20]),
            operations: Arc::default(),
        }
    }

    /// Waits for the time of an operation.
    async fn take(&self, time: Duration) {
        self.operations.fetch_add(1, Ordering::Relaxed);
        sleep(time).await;
    }

    fn content(&self) -> MutexGuard<'_, Vec<u8>> {
        self.content.lock().expect("no test panics meanwhile")
    }
}

impl Storage for Slow {
    fn name(&self) -> &str {
        "slow"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { alignment: self.alignment, ..PLAIN_CAPABILITIES }
    }

    fn size(&self) -> u64 {
        self.content().len() as u64
    }

    async fn read(&self, offset: u64, mut into: IoVector) -> blockhouse_core::Result<()> {
        self.take(self.write).await;
        let (content, length) = (self.content(), into.len());
        into.copy_from(&content[offset as usize..][..length]);
        Ok(())
    }

    async fn write(
        &self,
        offset: u64,
        from: IoVector,
        how: Durability,
    ) -> blockhouse_core::Result<()> {
        self.take(if how == Durability::None { self.write } else { self.durable_write }).await;
        let (mut content, end) = (self.content(), offset as usize + from.len());
        if content.len() < end {
            content.resize(end, 0);
        }
        from.copy_to(&mut content[offset as usize..end]);
        Ok(())
    }

    async fn write_zeroes(&self, _: ByteRange, _: Unmap) -> blockhouse_core::Result<()> {
        unreachable!("it says that it cannot")
    }

    async fn discard(&self, _: ByteRange) -> blockhouse_core::Result<()> {
        unreachable!("it says that it cannot")
    }

    async fn flush(&self, _: SyncMode) -> blockhouse_core::Result<()> {
        self.take(self.flush).await;
        Ok(())
    }

    async fn resize(&self, size: u64) -> blockhouse_core::Result<()> {
        self.content().resize(size as usize, 0);
        Ok(())
    }

    async fn block_status(&self, range: ByteRange) -> blockhouse_core::Result<(Allocation, u64)> {
        Ok((Allocation::Data, range.length()))
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
        let run =
            move || measure(disk, LoopSetup::plain(Engine::Threads), (load, limits), (None, stop));
        Variant {
            name: format!("{work:?}"),
            run: Box::new(run),
            published: None,
            cost: Cost::default(),
        }
    };
    let end = Instant::now() + Duration::from_secs(60);
    let variants = vec![variant(Work::WriteThenFlush), variant(other)];
    run_case("fua", Case { name: "slow".into(), variants }, (5, end), || {})
}

fn milliseconds(count: u64) -> Duration {
    Duration::from_millis(count)
}

#[test]
fn a_ratio_is_where_arithmetic_says() -> Result<()> {
    // 20 + 60 against 20 milliseconds.
    let storage = Slow::new(20, 20, 60);
    let rows = rows_of(storage, Work::DurableWrite)?;
    let ratio = rows[1].ratio.expect("it is not the baseline");
    assert_eq!(ratio.rounds, 5);
    for (row, expected) in rows.iter().zip([80e6, 20e6]) {
        let median = row.latency.value_at_quantile(0.5) as f64;
        assert!(median >= expected, "{}: {median}", row.variant);
        assert_eq!(row.latency.len(), 5 * 4, "each request of each round is counted");
        assert!(row.rate * median < 1.1e9, "one at a time: {} of {median} ns", row.rate);
    }
    Ok(())
}

#[test]
fn requests_in_flight_together_share_the_time() -> Result<()> {
    let storage = Slow::new(10, 10, 10);
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
    let sample = measure(
        &disk,
        LoopSetup::plain(Engine::Threads),
        (load, limits),
        (None, &Stop::default()),
    )?;
    assert_eq!((sample.requests, sample.bytes), (160, 160 * 4096));
    // 16 at a time: ten times 10 ms, and not 160 times.
    assert!(
        (milliseconds(100)..milliseconds(1600)).contains(&sample.elapsed),
        "{:?}",
        sample.elapsed
    );
    Ok(())
}

/// How many operations of the storage 64 pieces of 64 bytes take.
fn operations_of_state(storing: Storing) -> Result<u64> {
    let mut storage = Slow::new(0, 0, 0);
    storage.alignment = Alignment { offset: 4096, memory: 1 };
    let operations = Arc::clone(&storage.operations);
    EventLoop::new(EngineChoice::Auto)?.block_on(async {
        qcow2::create(&storage, &qcow2::CreateOptions::new(1 << 20)).await?;
        let disk = Disk::open(storage, ImageFormat::Qcow2, Options::default()).await?;
        let limits = vmstate::Limits { piece: 64, pieces: 64 };
        let before = operations.load(Ordering::Relaxed);
        let until = (Duration::from_secs(600), &Stop::default());
        let latency = vmstate::store(&disk, storing, limits, until).await?;
        assert_eq!(latency.len(), 64);
        Ok(operations.load(Ordering::Relaxed) - before)
    })
}

#[test]
fn the_state_of_a_machine_costs_as_many_operations_as_it_must() -> Result<()> {
    // A piece within a page that was written before is read and written with the page, 63 times.
    let unbuffered = operations_of_state(Storing::Unbuffered)?;
    assert!((126..260).contains(&unbuffered), "{unbuffered}");
    // One write, and then tables and a flush.
    let buffered = operations_of_state(Storing::Buffered)?;
    assert!((2..30).contains(&buffered), "{buffered}");
    Ok(())
}

#[test]
fn a_wakeup_that_is_withheld_costs_the_timer_and_one_in_force_nothing() -> Result<()> {
    let disk = Arc::new(Disk::raw(Slow::new(1, 1, 1), Options::default())?);
    let stop = Stop::default();
    // One batch: 1 ms, the read, and 1 ms after each of 16 completions.
    let batch =
        |wake_up| wakeup::measure(&disk, Engine::Threads, wake_up, (Duration::ZERO, None, &stop));
    let least = (UNRELATED_TIMER - milliseconds(20)).as_nanos() as u64;
    let (mut withheld, mut in_force) = (batch(WakeUp::Withheld)?, batch(WakeUp::InForce)?);
    // On a busy machine the timer may run before the batch begins, and a batch may take longer.
    for _ in 0..5 {
        if withheld.latency.min() < least {
            withheld = batch(WakeUp::Withheld)?;
        }
        if in_force.elapsed >= UNRELATED_TIMER {
            in_force = batch(WakeUp::InForce)?;
        }
    }
    assert_eq!((withheld.requests, in_force.requests), (16, 16));
    let (slow, quick) = (withheld.elapsed, in_force.elapsed);
    assert!(slow >= UNRELATED_TIMER, "{slow:?}");
    assert!((milliseconds(17)..UNRELATED_TIMER).contains(&quick), "{quick:?}");
    assert!(withheld.latency.min() >= least, "{} ns", withheld.latency.min());
    Ok(())
}
