//! The vhost-user client: it does what a guest's driver does, and costs less than any server that
//! it loads.
//!
//! One thread drives all queues. Requests are submitted, and their completions taken, in batches;
//! payloads are accessed only to stamp and to check them. Without a completion the client polls for
//! a while, as a guest does whose hypervisor polls before it halts the processor, and then sleeps
//! until it is notified. After a run of writes it reads some of the blocks back.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use blockhouse_engine::VolatileSlice;
use blockhouse_vhost_user::driver::{DescriptorSpec, Options, TestDriver};
use blockhouse_vhost_user::ring::WRITE;
use hdrhistogram::Histogram;
use rustix::time::{ClockId, clock_gettime};

use super::interrupt::Interrupt;
use super::light::{Load, Offsets, Operation};
use crate::measurement::{Latency, Measurement};
use lab_nbd::pattern::{self, SECTOR};

/// The longest time until a server answers.
const TIMEOUT: Duration = Duration::from_secs(10);
/// One reply in this many is checked.
const SAMPLE_EVERY: u64 = 64;
/// How many of the last writes are read back.
const READ_BACK: usize = 256;
/// Latencies above this many nanoseconds count as this.
const MAX_LATENCY: u64 = 60_000_000_000;

/// Types of requests (virtio 1.2, section 5.2.6).
const IN: u32 = 0;
const OUT: u32 = 1;

/// Descriptors of a request: header, data, status.
const CHAIN: u16 = 3;
/// Bytes before a slot's data, for its header and status.
const HEAD: usize = 4096;

/// A request's memory, and the request in flight in it.
struct Slot {
    head: VolatileSlice,
    data: VolatileSlice,
    offset: u64,
    posted: Instant,
}

/// One queue.
struct Queue {
    slots: Vec<Slot>,
    free: Vec<usize>,
}

/// One run with its queues.
struct Run<'a> {
    load: Load,
    poll_time: Duration,
    server_cpu: &'a dyn Fn() -> Result<Duration>,
    driver: TestDriver,
    queues: Vec<Queue>,
    offsets: Offsets,
    latency: Histogram<u64>,
    replies: u64,
    verified: u64,
    written: VecDeque<u64>,
    sample: Vec<u8>,
}

/// Runs `load` against the device behind `socket`. The client polls for `poll_time` before it
/// sleeps.
///
/// # Errors
/// Any wrong or missing answer of the server, and an interrupt.
pub fn run(
    load: Load,
    poll_time: Duration,
    socket: &Path,
    server_cpu: &dyn Fn() -> Result<Duration>,
    interrupt: &Interrupt,
) -> Result<Measurement> {
    let mut run = Run::open(load, poll_time, socket, server_cpu)?;
    run.run_until(Instant::now() + load.warm_up, interrupt)?;
    run.latency.reset();
    let (time, server, client) = run.clocks()?;
    let requests = run.run_until(time + load.duration, interrupt)?;
    let (end, server_end, client_end) = run.clocks()?;
    let at = |quantile| Duration::from_nanos(run.latency.value_at_quantile(quantile));
    let mut measured = Measurement {
        requests,
        elapsed: end - time,
        server_cpu: server_end.saturating_sub(server),
        client_cpu: client_end.saturating_sub(client),
        latency: Latency { median: at(0.5), p99: at(0.99) },
        verified: 0,
    };
    run.drain(interrupt)?;
    if load.operation != Operation::Read {
        run.read_back(interrupt)?;
    }
    measured.verified = run.verified;
    Ok(measured)
}

impl<'a> Run<'a> {
    fn open(
        load: Load,
        poll_time: Duration,
        socket: &Path,
        server_cpu: &'a dyn Fn() -> Result<Duration>,
    ) -> Result<Self> {
        let depth = load.depth / load.connections;
        let entries = (CHAIN * depth).next_power_of_two();
        let room = HEAD + (load.block as usize).next_multiple_of(HEAD);
        let memory = room * usize::from(depth) * usize::from(load.connections);
        let options = Options { queues: load.connections, entries, memory, ..Options::default() };
        let mut driver = connect(socket, options)?;
        if load.operation == Operation::DurableWrite {
            driver.set_writeback(0).context("cannot turn the write cache off")?;
        }
        let blocks = driver.capacity()? / u64::from(load.block);
        ensure!(blocks > 0, "the device is smaller than one request");
        let mut run = Self {
            load,
            poll_time,
            server_cpu,
            queues: Vec::new(),
            offsets: Offsets::new(load.order, load.block.into(), blocks, load.generation),
            latency: Histogram::new_with_bounds(1, MAX_LATENCY, 3).context("no histogram")?,
            replies: 0,
            verified: 0,
            written: VecDeque::with_capacity(READ_BACK),
            sample: vec![0; load.block as usize],
            driver,
        };
        for queue in 0..load.connections {
            let slots = (0..depth).map(|slot| run.slot(queue, slot, depth, room));
            let slots = slots.collect::<Result<Vec<_>>>()?;
            run.queues.push(Queue { free: (0..slots.len()).collect(), slots });
        }
        Ok(run)
    }

    /// The memory of a slot, with the parts of a request that never change.
    fn slot(&self, queue: u16, slot: u16, depth: u16, room: usize) -> Result<Slot> {
        let block = self.load.block;
        let place = usize::from(queue) * usize::from(depth) + usize::from(slot);
        let start = self.driver.requests() + place * room;
        let view = |offset, length| {
            let memory = Arc::clone(&self.driver.memory);
            VolatileSlice::new(memory, offset, length).context("too little memory")
        };
        let (head, data) = (view(start, HEAD)?, view(start + HEAD, block as usize)?);
        let mut bytes = vec![0; block as usize];
        pattern::fill(&mut bytes, 0, self.load.generation);
        self.driver.memory.write(start + HEAD, &bytes);
        self.describe(queue, slot, start, self.load.operation);
        Ok(Slot { head, data, offset: 0, posted: Instant::now() })
    }

    fn describe(&self, queue: u16, slot: u16, start: usize, operation: Operation) {
        let is_read = operation == Operation::Read;
        let kind = if is_read { IN } else { OUT };
        self.driver.memory.write(start, &kind.to_le_bytes());
        let flags = if is_read { WRITE } else { 0 };
        let chain = [
            DescriptorSpec::at(start, 16, 0),
            DescriptorSpec::at(start + HEAD, self.load.block, flags),
            DescriptorSpec::at(start + 16, 1, WRITE),
        ];
        self.driver.queues[usize::from(queue)].chain(CHAIN * slot, &chain);
    }

    fn clocks(&self) -> Result<(Instant, Duration, Duration)> {
        let client = clock_gettime(ClockId::ThreadCPUTime);
        let client = client.try_into().context("the thread's clock runs backwards")?;
        Ok((Instant::now(), (self.server_cpu)()?, client))
    }

    /// Keeps all slots busy until `end`; returns how many requests were answered.
    fn run_until(&mut self, end: Instant, interrupt: &Interrupt) -> Result<u64> {
        let mut answered = 0;
        let mut now = Instant::now();
        while now < end {
            interrupt.check()?;
            for queue in 0..self.queues.len() {
                self.post(queue, now);
            }
            answered += self.take_some()?;
            now = Instant::now();
        }
        Ok(answered)
    }

    /// Uses all free slots of a queue.
    fn post(&mut self, index: usize, now: Instant) {
        let queue = &mut self.queues[index];
        if queue.free.is_empty() {
            return;
        }
        while let Some(number) = queue.free.pop() {
            let slot = &mut queue.slots[number];
            slot.offset = self.offsets.next();
            slot.posted = now;
            slot.head.store_u64(8, slot.offset / SECTOR as u64);
            if self.load.operation != Operation::Read {
                stamp(&slot.data, slot.offset);
            }
            self.driver.queues[index].add_available(CHAIN * number as u16);
        }
        self.driver.queues[index].publish();
    }

    /// Waits for at least one completion and takes all; returns their number.
    fn take_some(&mut self) -> Result<u64> {
        let started = Instant::now();
        loop {
            let mut taken = 0;
            for queue in 0..self.queues.len() {
                taken += self.take(queue)?;
            }
            if taken > 0 {
                return Ok(taken);
            }
            if started.elapsed() > self.poll_time
                && !self.driver.queues.iter().any(|queue| queue.arm())
            {
                self.sleep()?;
            }
            std::hint::spin_loop();
        }
    }

    /// Sleeps until a queue is notified. With several queues, sleeps 1 ms at most: each queue has
    /// an eventfd of its own, and only the first one is waited for.
    fn sleep(&self) -> Result<()> {
        match &self.driver.queues[..] {
            [queue] => ensure!(queue.sleep(TIMEOUT), "no answer within {TIMEOUT:?}"),
            [first, ..] => drop(first.sleep(Duration::from_millis(1))),
            [] => bail!("no queues"),
        }
        Ok(())
    }

    fn take(&mut self, index: usize) -> Result<u64> {
        let mut taken = 0;
        let mut now = None;
        while let Some((head, _)) = self.driver.queues[index].next_used() {
            let now = *now.get_or_insert_with(Instant::now);
            let number = usize::from(head / CHAIN);
            let slot = &self.queues[index].slots[number];
            let status = slot.head.load_u8(16);
            ensure!(status == 0, "status {status} for offset {}", slot.offset);
            self.latency.saturating_record((now - slot.posted).as_nanos() as u64);
            let offset = slot.offset;
            self.replies += 1;
            if self.load.operation == Operation::Read {
                if self.replies.is_multiple_of(SAMPLE_EVERY) {
                    self.check(index, number, None)?;
                }
            } else {
                self.written.truncate(READ_BACK - 1);
                self.written.push_front(offset);
            }
            self.queues[index].free.push(number);
            taken += 1;
        }
        Ok(taken)
    }

    fn check(&mut self, index: usize, number: usize, generation: Option<u64>) -> Result<()> {
        let slot = &self.queues[index].slots[number];
        slot.data.read(0, &mut self.sample);
        if let Err(what) = pattern::verify(&self.sample, slot.offset, generation) {
            bail!("wrong data: {what}");
        }
        self.verified += 1;
        Ok(())
    }

    fn busy(&self) -> bool {
        self.queues.iter().any(|queue| queue.free.len() < queue.slots.len())
    }

    /// Waits until nothing is in flight.
    fn drain(&mut self, interrupt: &Interrupt) -> Result<()> {
        while self.busy() {
            interrupt.check()?;
            self.take_some()?;
        }
        Ok(())
    }

    /// Reads the blocks of the last writes, which must hold their data.
    fn read_back(&mut self, interrupt: &Interrupt) -> Result<()> {
        let generation = self.load.generation;
        self.load.operation = Operation::Read;
        self.describe(0, 0, self.driver.requests(), Operation::Read);
        for offset in std::mem::take(&mut self.written) {
            let slot = &mut self.queues[0].slots[0];
            slot.offset = offset;
            slot.head.store_u64(8, offset / SECTOR as u64);
            self.queues[0].free.retain(|&free| free != 0);
            self.driver.queues[0].add_available(0);
            self.driver.queues[0].publish();
            self.drain(interrupt)?;
            self.check(0, 0, Some(generation))?;
        }
        Ok(())
    }
}

/// Writes into each sector of a block the offset that it belongs to.
fn stamp(data: &VolatileSlice, offset: u64) {
    for start in (0..data.len()).step_by(SECTOR) {
        data.store_u64(start, offset + start as u64);
    }
}

/// Connects. Tries again while the server is busy with the connection that tested whether it
/// listens.
fn connect(socket: &Path, options: Options) -> Result<TestDriver> {
    let started = Instant::now();
    loop {
        match TestDriver::connect(socket, options) {
            Err(error) if started.elapsed() > Duration::from_secs(3) => {
                return Err(error).context("cannot connect to the device");
            }
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
            Ok(driver) => return Ok(driver),
        }
    }
}
