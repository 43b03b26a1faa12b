//! `bench wakeup`: the cost if a request does not wake the sleeping loop that executes it.
//!
//! The published case: pieces of 128 KiB are read with direct I/O in batches of 16, with a pause of
//! 1 ms before each batch is submitted and 1 ms after each completion is handled; the process is
//! idle otherwise. One thread submits; an event loop on another thread does the I/O, and is asleep
//! when a batch arrives.
//!
//! With wake-ups, the thread submits through the loop's handle, as every user of the engine does.
//! Without wake-ups, the thread puts the requests into a channel that the loop reads when an
//! unrelated timer fires. This file implements the channel, because the engine has no way to
//! suppress a wake-up.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use blockhouse_core::{Buffer, Request, Storage, rare};
use blockhouse_disk::Disk;
use blockhouse_engine::{Engine, EngineChoice, Handle, LoopThread, sleep, spawn_detached};

use crate::bench::device::Device;
use crate::bench::load::{Clocks, End, Sample, machine_clock, new_histogram};
use crate::bench::rows::{Case, Cases, Cost, Published, Variant};
use crate::bench::stop::Stop;
use crate::bench::testbed::Testbed;

const PIECE: usize = 128 << 10;
const BATCH: usize = 16;
const PAUSE: Duration = Duration::from_millis(1);
/// The part of the disk that is read.
const SPAN: u64 = 128 << 20;

/// The interval of the unrelated timer that eventually wakes the loop.
pub const UNRELATED_TIMER: Duration = Duration::from_millis(499);

/// The text for the page of results.
pub const ABOUT: &str = "A request that another thread leaves to a sleeping loop waits until something wakes the loop. Pieces of \
    128 KiB in batches of 16, with pauses of 1 ms, so that the loop sleeps whenever a batch comes. “Withheld” \
    is the bench's own way around the wake-up: the loop finds its requests when a timer of 499 ms fires.";

/// The published figure for 128 MiB, converted to pieces per second.
const WITHHELD: Published = Published { value: 39.8, detail: "QEMU commit 2ae361ef1d7d: 25.76 s" };
const IN_FORCE: Published = Published { value: 788.0, detail: "QEMU commit 2ae361ef1d7d: 1.30 s" };

/// Whether a new request wakes the loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WakeUp {
    /// A request wakes the loop.
    InForce,
    /// The loop finds the request when a timer fires.
    Withheld,
}

/// The one case: without wake-ups, and with them on each engine.
pub fn cases(testbed: &Testbed) -> Cases<'_> {
    let variant = |name: String, engine, wake_up| Variant {
        name,
        run: Box::new(move || {
            let end = (testbed.sample_time(), testbed.device(), testbed.stop());
            measure(testbed.disk(), engine, wake_up, end)
        }),
        published: Some(if wake_up == WakeUp::InForce { IN_FORCE } else { WITHHELD }),
        cost: Cost {
            extra: if wake_up == WakeUp::InForce { PAUSE * 40 } else { UNRELATED_TIMER },
            written: 0,
        },
    };
    let withheld = variant("withheld".into(), testbed.engines()[0], WakeUp::Withheld);
    let in_force = testbed.engines().iter();
    let in_force = in_force.map(|&one| variant(format!("in force, {one}"), one, WakeUp::InForce));
    let name = "batches of 16 x 128K from another thread".into();
    Cases::all([Case { name, variants: std::iter::once(withheld).chain(in_force).collect() }])
}

/// Reads batches until the time is up, but at least one.
pub fn measure<S: Storage + Send + Sync + 'static>(
    disk: &Arc<Disk<S>>,
    engine: Engine,
    wake_up: WakeUp,
    (time, device, stop): (Duration, Option<&Device>, &Stop),
) -> Result<Sample> {
    let started = LoopThread::start("wakeup".into(), EngineChoice::Only(engine), |_| ());
    let event_loop = started.with_context(|| format!("no {engine} here"))?;
    let method = match wake_up {
        WakeUp::InForce => SubmitMethod::Handle(event_loop.handle().clone()),
        WakeUp::Withheld => {
            let (sender, inbox) = mpsc::channel();
            drop(event_loop.handle().spawn(|| look_now_and_then(inbox)));
            SubmitMethod::Unannounced(sender)
        }
    };
    let clocks = Clocks::start(device, &machine_clock);
    let outcome = run(disk, &method, (time, stop));
    drop(method);
    let sample = outcome
        .map(|latency| clocks.end(End::now(&machine_clock), latency.len() * PIECE as u64, latency));
    event_loop.stop();
    stop.check()?;
    sample
}

/// How a request is passed from one thread to the other.
enum SubmitMethod<S: Storage> {
    Handle(Handle),
    Unannounced(mpsc::Sender<Piece<S>>),
}

/// One piece to read, and the channel for its outcome.
struct Piece<S: Storage> {
    disk: Arc<Disk<S>>,
    offset: u64,
    buffer: Buffer,
    submitted: Instant,
    done: mpsc::Sender<Done>,
}

/// The memory of a completed piece, its latency and its outcome.
type Done = (Buffer, Duration, blockhouse_core::Result<()>);

async fn read<S: Storage>(piece: Piece<S>) {
    let Piece { disk, offset, mut buffer, submitted, done } = piece;
    let outcome = rare(disk.submit(Request::Read { offset, into: buffer.lend() })).await;
    // The send fails only if another piece has failed, because then the receiver is dropped.
    let _ = done.send((buffer, submitted.elapsed(), outcome));
}

/// Reads requests without wake-ups: a request stays in the channel until a timer fires.
async fn look_now_and_then<S: Storage + 'static>(inbox: mpsc::Receiver<Piece<S>>) {
    loop {
        match inbox.try_recv() {
            Ok(piece) => spawn_detached(read(piece)),
            Err(mpsc::TryRecvError::Empty) => sleep(UNRELATED_TIMER).await,
            Err(mpsc::TryRecvError::Disconnected) => return,
        }
    }
}

/// Runs the published case. Returns the nanoseconds from each submission to its completion.
fn run<S: Storage + Send + Sync + 'static>(
    disk: &Arc<Disk<S>>,
    method: &SubmitMethod<S>,
    (time, stop): (Duration, &Stop),
) -> Result<hdrhistogram::Histogram<u64>> {
    let mut buffers: Vec<Buffer> = (0..BATCH).map(|_| Buffer::new(PIECE)).collect();
    let (done, all_done) = mpsc::channel();
    let mut latency = new_histogram();
    let (begin, span) = (Instant::now(), SPAN.min(disk.size()));
    let mut offsets = (0..span / PIECE as u64).map(|number| number * PIECE as u64).cycle();
    while latency.is_empty() || (begin.elapsed() < time && !stop.is_asked()) {
        thread::sleep(PAUSE);
        for (buffer, offset) in buffers.drain(..).zip(&mut offsets) {
            let (disk, done) = (Arc::clone(disk), done.clone());
            submit(method, Piece { disk, offset, buffer, submitted: Instant::now(), done })?;
        }
        for _ in 0..BATCH {
            let (buffer, time, outcome) = all_done.recv().context("this end has a sender, too")?;
            outcome?;
            let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
            latency.record(nanoseconds.max(1)).expect("the histogram grows");
            buffers.push(buffer);
            thread::sleep(PAUSE);
        }
    }
    Ok(latency)
}

fn submit<S: Storage + Send + Sync + 'static>(
    method: &SubmitMethod<S>,
    piece: Piece<S>,
) -> Result<()> {
    match method {
        // The outcome arrives through the channel of the piece.
        SubmitMethod::Handle(handle) => drop(handle.spawn(move || read(piece))),
        SubmitMethod::Unannounced(requests) => {
            requests.send(piece).ok().context("the loop ended before its requests")?;
        }
    }
    Ok(())
}
