//! The guest during a mirror or a fork: an NBD client that writes blocks at random places without a
//! pause, and knows what the disk must hold.
//!
//! No two writes of a block are in flight together, and the data of each write has its number. So a
//! later read of the block shows whether it holds the write that was answered last.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use lab_nbd::{Client, Framing, handshake, pattern};

use crate::interrupt::Interrupt;
use crate::light::connection::{Check, Connection, Job, Wait};
use crate::light::{Offsets, Operation, Order};

/// Bytes of a write.
const BLOCK: u64 = 4096;
/// Bytes of one read when the whole disk is read.
const PART: u64 = 1 << 20;

/// The progress of a guest that writes, for other threads.
#[derive(Default)]
pub struct Progress {
    answered: AtomicU64,
    /// The longest time without an answer, in nanoseconds.
    gap: AtomicU64,
    is_over: AtomicBool,
}

impl Progress {
    /// How many writes were answered so far.
    pub fn answered(&self) -> u64 {
        self.answered.load(Relaxed)
    }

    /// The longest time without a reply since the last call.
    pub fn take_gap(&self) -> Duration {
        Duration::from_nanos(self.gap.swap(0, Relaxed))
    }

    /// Tells the guest to stop.
    pub fn stop(&self) {
        self.is_over.store(true, Relaxed);
    }
}

/// The content of a disk, or of its beginning: the numbers of its blocks.
pub struct Content {
    /// The write that was sent last; 0: none.
    sent: Vec<u64>,
    /// The write that was answered last; 0: none.
    answered: Vec<u64>,
    last: u64,
}

impl Content {
    /// The content of `size` bytes that were never written.
    pub fn new(size: u64) -> Self {
        let blocks = vec![0; (size / BLOCK) as usize];
        Self { sent: blocks.clone(), answered: blocks, last: 0 }
    }

    /// The offset and the number of the next write, to a block without a write in flight.
    fn next(&mut self, offsets: &mut Offsets) -> (u64, u64) {
        loop {
            let offset = offsets.next();
            let block = (offset / BLOCK) as usize;
            if self.sent[block] == self.answered[block] {
                self.last += 1;
                self.sent[block] = self.last;
                return (offset, self.last);
            }
        }
    }

    /// Writes the whole disk once, in order.
    ///
    /// # Errors
    /// An error of the server.
    pub fn fill(&mut self, socket: &Path, export: &str) -> Result<()> {
        let (stream, export) = handshake::open(socket, export)?;
        let mut client = Client::new(stream, Framing::Simple, export);
        self.last += 1;
        let mut part = vec![0; PART as usize];
        pattern::fill(&mut part, 0, self.last);
        for start in (0..self.sent.len() as u64 * BLOCK).step_by(part.len()) {
            pattern::move_to(&mut part, start);
            let error = client.write(start, &part, 0);
            ensure!(error == 0, "writing at {start}: error {error}");
        }
        client.disconnect();
        self.sent.fill(self.last);
        self.answered.fill(self.last);
        Ok(())
    }

    /// Reads the whole disk. Each block must hold the write that was answered last.
    ///
    /// # Errors
    /// The error names the block that is wrong.
    pub fn verify(&self, socket: &Path, export: &str) -> Result<()> {
        let (stream, export) = handshake::open(socket, export)?;
        ensure!(export.size / BLOCK >= self.answered.len() as u64, "the disk is shorter");
        let mut client = Client::new(stream, Framing::Simple, export);
        let size = self.answered.len() as u64 * BLOCK;
        for start in (0..size).step_by(PART as usize) {
            let read = client.read(start, PART.min(size - start));
            let bytes = read.map_err(|error| anyhow!("reading at {start}: error {error}"))?;
            for (block, bytes) in (start / BLOCK..).zip(bytes.chunks_exact(BLOCK as usize)) {
                let number = self.answered[block as usize];
                let found = pattern::verify(bytes, block * BLOCK, Some(number));
                found.map_err(|what| anyhow!("write {number}: {what}"))?;
            }
        }
        client.disconnect();
        Ok(())
    }
}

/// Writes with `depth` blocks in flight until `progress` says stop. On return all writes have been
/// answered.
///
/// # Errors
/// Any wrong or missing answer, and an interrupt.
pub fn write(
    (socket, export): (&Path, &str),
    depth: u16,
    content: &mut Content,
    progress: &Progress,
    interrupt: &Interrupt,
) -> Result<()> {
    let (operation, check) = (Operation::Write, Check::Nothing);
    let job = Job { operation, length: BLOCK as u32, depth, generation: 0, check };
    let (mut connection, _) = Connection::open(socket, export, job)?;
    let blocks = content.sent.len() as u64;
    let mut offsets = Offsets::new(Order::Random, BLOCK, blocks, content.last + 1);
    let batch = usize::from(depth / 8).max(1);
    let mut last = Instant::now();
    loop {
        let is_over = progress.is_over.load(Relaxed);
        if is_over && connection.busy() == 0 {
            break;
        }
        interrupt.check()?;
        if !is_over && connection.free() >= batch {
            connection.submit_stamped(|| content.next(&mut offsets), Instant::now());
        }
        connection.flush()?;
        let wait = if connection.has_unsent() { Wait::Never } else { Wait::Block };
        let before = connection.busy();
        connection.receive(wait, |completion| {
            let block = (completion.offset / BLOCK) as usize;
            content.answered[block] = content.sent[block];
        })?;
        let answered = before - connection.busy();
        if answered > 0 {
            let now = Instant::now();
            progress.gap.fetch_max((now - last).as_nanos() as u64, Relaxed);
            progress.answered.fetch_add(answered as u64, Relaxed);
            last = now;
        }
    }
    connection.close().context("the guest's end")
}
