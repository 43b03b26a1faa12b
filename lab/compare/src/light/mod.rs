//! The light client: an NBD client that costs less than any server it measures.
//!
//! One thread drives all connections. It sends and receives in batches, reads payloads only to
//! check samples of them, and reads the clock once a batch. After a run of writes the client reads
//! some of the blocks back, which must hold the data of this run.
//!
//! - [`connection`]: slots, batches, checks
//! - [`null_server`]: the server that shows the client's own limit

pub mod connection;
pub mod null_server;

use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::time::{ClockId, clock_gettime};

use self::connection::{Check, Completion, Connection, Job, Wait};
use crate::interrupt::Interrupt;
use crate::measurement::{Latency, Measurement};
pub use lab_nbd::wire::Operation;

/// How many of the last writes are read back.
const READ_BACK: usize = 256;
/// Latencies above this many nanoseconds count as this.
const MAX_LATENCY: u64 = 60_000_000_000;
const POLL_PATIENCE: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// The order of a load's offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Any block of the export, each time.
    Random,
    /// One block after the other, from the start again after the end.
    Sequential,
}

/// The load that the client puts on a server.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Reads or writes.
    pub operation: Operation,
    /// Where.
    pub order: Order,
    /// Bytes in a request.
    pub block: u32,
    /// Requests in flight, over all connections.
    pub depth: u16,
    /// Connections that share the depth evenly.
    pub connections: u16,
    /// The time at the start that is not counted.
    pub warm_up: Duration,
    /// The counted time, which ends earlier if `requests` are answered.
    pub duration: Duration,
    /// The counted time ends with this many answers.
    pub requests: u64,
    /// A number that no other run on the same image has, and not 0.
    pub generation: u64,
    /// Whether reads return the image's data.
    pub content: Content,
}

/// The data that a server's reads return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// The content of the image.
    Image,
    /// Data that no image holds, and that cannot be checked.
    Nothing,
}

/// Offsets of requests, in bytes.
pub struct Offsets {
    order: Order,
    block: u64,
    blocks: u64,
    state: u64,
}

impl Offsets {
    /// The requests of one run over this many blocks.
    pub fn new(order: Order, block: u64, blocks: u64, generation: u64) -> Self {
        let state = generation.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        Self { order, block, blocks, state }
    }

    /// The next one.
    pub fn next(&mut self) -> u64 {
        let index = match self.order {
            Order::Random => {
                // xorshift64: three shifts instead of a multiplication chain, good enough to
                // spread.
                self.state ^= self.state << 13;
                self.state ^= self.state >> 7;
                self.state ^= self.state << 17;
                // The high half of the product maps the state to a block without a division.
                ((u128::from(self.state) * u128::from(self.blocks)) >> 64) as u64
            }
            Order::Sequential => {
                self.state += 1;
                self.state % self.blocks
            }
        };
        index * self.block
    }
}

/// Readings at the start of the counted time.
struct Start {
    time: Instant,
    server_cpu: Duration,
    client_cpu: Duration,
}

/// One run over its connections.
struct Run<'a> {
    load: Load,
    server_cpu: &'a dyn Fn() -> Result<Duration>,
    connections: Vec<Connection>,
    offsets: Offsets,
    /// How many slots of a connection must be free before they are used again.
    batch: usize,
    latency: Histogram<u64>,
    written: VecDeque<u64>,
}

/// Runs `load` against the export `name` behind `socket`. `server_cpu` tells the processor time
/// that the server has used so far.
///
/// # Errors
/// Any wrong or missing answer of the server, and an interrupt.
pub fn run(
    load: Load,
    socket: &Path,
    name: &str,
    server_cpu: &dyn Fn() -> Result<Duration>,
    interrupt: &Interrupt,
) -> Result<Measurement> {
    let job = Job {
        operation: load.operation,
        length: load.block,
        depth: load.depth / load.connections,
        generation: load.generation,
        check: match load.content {
            Content::Image => Check::Samples,
            Content::Nothing => Check::Nothing,
        },
    };
    let mut connections = Vec::new();
    let mut size = 0;
    for _ in 0..load.connections {
        let (connection, export) = Connection::open(socket, name, job)?;
        connections.push(connection);
        size = export.size;
    }
    let blocks = size / u64::from(load.block);
    ensure!(blocks > 0, "the export has {size} bytes, less than one request");
    let mut run = Run {
        load,
        server_cpu,
        connections,
        offsets: Offsets::new(load.order, load.block.into(), blocks, load.generation),
        batch: usize::from(job.depth / 8).max(1),
        latency: Histogram::new_with_bounds(1, MAX_LATENCY, 3)
            .context("cannot make a histogram")?,
        written: VecDeque::with_capacity(READ_BACK),
    };
    let mut measured = run.measure(interrupt)?;
    measured.verified = run.connections.iter().map(Connection::verified).sum();
    for connection in run.connections {
        connection.close()?;
    }
    if load.operation != Operation::Read && load.content == Content::Image {
        measured.verified += read_back(socket, name, job, run.written)?;
    }
    Ok(measured)
}

impl Run<'_> {
    fn measure(&mut self, interrupt: &Interrupt) -> Result<Measurement> {
        self.run_for(self.load.warm_up, u64::MAX, interrupt)?;
        self.latency.reset();
        let start = self.read_clocks()?;
        let requests = self.run_for(self.load.duration, self.load.requests, interrupt)?;
        let end = self.read_clocks()?;
        let measured = Measurement {
            requests,
            elapsed: end.time - start.time,
            server_cpu: end.server_cpu.saturating_sub(start.server_cpu),
            client_cpu: end.client_cpu.saturating_sub(start.client_cpu),
            latency: Latency {
                median: Duration::from_nanos(self.latency.value_at_quantile(0.5)),
                p99: Duration::from_nanos(self.latency.value_at_quantile(0.99)),
            },
            verified: 0,
        };
        self.drain()?;
        Ok(measured)
    }

    fn read_clocks(&self) -> Result<Start> {
        Ok(Start {
            time: Instant::now(),
            server_cpu: (self.server_cpu)()?,
            client_cpu: clock_gettime(ClockId::ThreadCPUTime)
                .try_into()
                .context("the thread's clock runs backwards")?,
        })
    }

    /// Keeps all slots busy for this time, or until `enough` requests were answered; returns how
    /// many were.
    fn run_for(&mut self, time: Duration, enough: u64, interrupt: &Interrupt) -> Result<u64> {
        let mut answered = 0;
        let start = Instant::now();
        let mut now = start;
        while now - start < time && answered < enough {
            interrupt.check()?;
            for connection in &mut self.connections {
                if connection.free() >= self.batch {
                    connection.submit(|| self.offsets.next(), now);
                }
                connection.flush()?;
            }
            answered += self.receive()?;
            now = Instant::now();
        }
        Ok(answered)
    }

    /// Waits until nothing is in flight.
    fn drain(&mut self) -> Result<()> {
        while self.connections.iter().any(|connection| connection.busy() > 0) {
            for connection in &mut self.connections {
                connection.flush()?;
            }
            self.receive()?;
        }
        Ok(())
    }

    /// Waits for replies and receives them; returns their number.
    fn receive(&mut self) -> Result<u64> {
        let ready = self.wait()?;
        let (latency, written) = (&mut self.latency, &mut self.written);
        let keep = self.load.operation != Operation::Read;
        let mut answered = 0;
        for (connection, wait) in self.connections.iter_mut().zip(ready) {
            let Some(wait) = wait else { continue };
            let mut now = None;
            connection.receive(wait, |Completion { submitted, offset }| {
                let now = *now.get_or_insert_with(Instant::now);
                latency.saturating_record((now - submitted).as_nanos() as u64);
                answered += 1;
                if keep {
                    written.truncate(READ_BACK - 1);
                    written.push_front(offset);
                }
            })?;
        }
        Ok(answered)
    }

    /// How to receive from each connection; `None`: do not receive. A single connection may sleep
    /// in the receive call.
    fn wait(&self) -> Result<Vec<Option<Wait>>> {
        if let [connection] = self.connections.as_slice()
            && !connection.has_unsent()
        {
            return Ok(vec![Some(Wait::Block)]);
        }
        let mut descriptors: Vec<PollFd> = self
            .connections
            .iter()
            .map(|connection| {
                let room =
                    if connection.has_unsent() { PollFlags::OUT } else { PollFlags::empty() };
                PollFd::new(connection.stream(), PollFlags::IN | room)
            })
            .collect();
        match poll(&mut descriptors, Some(&POLL_PATIENCE)) {
            Ok(0) => ensure!(false, "no reply within {} s", POLL_PATIENCE.tv_sec),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("cannot poll"),
        }
        let readable = PollFlags::IN | PollFlags::HUP | PollFlags::ERR;
        let wait = |fd: &PollFd| fd.revents().intersects(readable).then_some(Wait::Never);
        Ok(descriptors.iter().map(wait).collect())
    }
}

/// Reads the blocks at `offsets`, which must hold the data that `written` wrote; returns their
/// number.
fn read_back(socket: &Path, name: &str, written: Job, offsets: VecDeque<u64>) -> Result<u64> {
    let job = Job {
        operation: Operation::Read,
        depth: 1,
        check: Check::Written(written.generation),
        ..written
    };
    let (mut connection, _) = Connection::open(socket, name, job)?;
    for offset in offsets {
        connection.submit(|| offset, Instant::now());
        connection.flush()?;
        while connection.busy() > 0 {
            connection.receive(Wait::Block, |_| {})?;
        }
    }
    let verified = connection.verified();
    connection.close()?;
    Ok(verified)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use tempfile::TempDir;

    use super::*;

    const LOAD: Load = Load {
        operation: Operation::Read,
        order: Order::Random,
        block: 4096,
        depth: 16,
        connections: 1,
        warm_up: Duration::ZERO,
        duration: Duration::from_millis(200),
        requests: u64::MAX,
        generation: 1,
        content: Content::Nothing,
    };

    /// A null server that ends with the test process.
    fn null_server() -> (TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("nbd.sock");
        let listening = socket.clone();
        std::thread::spawn(move || null_server::serve(&listening, 1 << 24));
        // The socket's file exists shortly before the server listens.
        while std::os::unix::net::UnixStream::connect(&socket).is_err() {
            std::thread::yield_now();
        }
        (folder, socket)
    }

    fn run_against_null_server(load: Load) -> Result<Measurement> {
        let (_folder, socket) = null_server();
        run(load, &socket, "disk", &|| Ok(Duration::ZERO), &Interrupt::default())
    }

    #[test]
    fn every_kind_of_load_is_answered() {
        for operation in [Operation::Read, Operation::Write, Operation::DurableWrite] {
            for connections in [1, 4] {
                for block in [512, 4096, 256 * 1024] {
                    let load = Load { operation, connections, block, ..LOAD };
                    let measured = run_against_null_server(load).unwrap();
                    assert!(measured.requests > 0, "{load:?}");
                    assert!(measured.latency.median > Duration::ZERO, "{load:?}");
                }
            }
        }
    }

    #[test]
    fn data_that_is_not_the_images_is_noticed() {
        let load = Load { content: Content::Image, order: Order::Sequential, ..LOAD };
        let error = run_against_null_server(load).unwrap_err().to_string();
        assert!(error.starts_with("wrong data"), "{error}");
    }

    #[test]
    fn writes_that_are_dropped_are_noticed() {
        let load = Load { content: Content::Image, operation: Operation::Write, ..LOAD };
        let error = run_against_null_server(load).unwrap_err().to_string();
        assert!(error.starts_with("wrong data"), "{error}");
    }

    #[test]
    fn random_offsets_reach_the_whole_export() {
        let mut offsets = Offsets { order: Order::Random, block: 512, blocks: 64, state: 7 };
        let seen: std::collections::BTreeSet<u64> = (0..4096).map(|_| offsets.next()).collect();
        assert_eq!(seen.len(), 64);
        assert_eq!(seen.last(), Some(&(63 * 512)));
    }
}
