//! A guest on a vhost-user-blk device whose requests in flight outlive the server.
//!
//! The rings and its in-flight memory stay when the server is killed. The next server gets both and
//! completes the requests that the last server did not. So a guest never loses a request.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use blockhouse_vhost_user::driver::{DescriptorSpec, Options, TestDriver};
use blockhouse_vhost_user::ring::WRITE;
use fastrand::Rng;

use crate::load::{Load, MAX_DATA, Phase, Planned};
use crate::model::Action;

/// Types of requests (virtio 1.2, section 5.2.6).
const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;
/// A zero write may deallocate the space (`VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP`).
const UNMAP: u32 = 1;

const SECTOR: u64 = 512;
const QUEUES: u16 = 2;
const SLOTS: u16 = 12;
/// Descriptors of a request, at most: header, data in two buffers, status.
const CHAIN: u16 = 4;
const ENTRIES: u16 = 64;
/// Bytes of a slot: a page for header, ranges and status, and the data.
const HEAD: usize = 4096;
const SLOT: usize = HEAD + MAX_DATA as usize;
const STATUS: usize = 512;
/// The time in which a restarted server must complete the requests in flight.
const RESUME_LIMIT: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(1);

/// A request in a slot.
enum InFlight {
    Range(Planned),
    Flush,
}

/// The guest, with the requests in flight in each slot of each queue.
pub struct Guest {
    driver: TestDriver,
    slots: Vec<Vec<Option<InFlight>>>,
}

impl Guest {
    /// Connects for the first time.
    pub fn connect(socket: &Path, load: &Load, random: &mut Rng) -> Result<Self> {
        let memory = SLOT * usize::from(SLOTS) * usize::from(QUEUES);
        let options = Options { queues: QUEUES, entries: ENTRIES, memory, ..Options::default() };
        let mut driver = TestDriver::connect(socket, options).context("the device")?;
        driver.track().context("in-flight tracking")?;
        if load.has_flushes() && random.u8(..4) == 0 {
            driver.set_writeback(0).context("the write cache")?;
        }
        let size = driver.capacity()?;
        ensure!(size == load.size(), "the disk has {size} bytes");
        let slots = || (0..SLOTS).map(|_| None).collect();
        Ok(Self { driver, slots: (0..QUEUES).map(|_| slots()).collect() })
    }

    /// Connects to the next server, which must complete the requests that the last server did not.
    ///
    /// # Errors
    /// The server does not complete a request, or a request fails.
    pub fn reconnect(&mut self, socket: &Path, load: &Load) -> Result<()> {
        self.driver.reconnect(socket).context("the next server does not take over")?;
        let end = Instant::now() + RESUME_LIMIT;
        while self.is_busy() {
            if self.take(load)? == 0 {
                if Instant::now() > end {
                    bail!("requests in flight were not done again: {}", self.busy());
                }
                std::thread::sleep(PAUSE);
            }
        }
        Ok(())
    }

    /// Connects to a server that is killed meanwhile, and that may complete some requests before.
    ///
    /// # Errors
    /// A request failed, or a read showed wrong bytes.
    pub fn reconnect_in_vain(&mut self, socket: &Path, load: &Load, random: Rng) -> Result<()> {
        // It fails if the server has ended already.
        let _ = self.driver.reconnect(socket);
        self.run(load, 0, random)
    }

    fn is_busy(&self) -> bool {
        self.slots.iter().flatten().any(Option::is_some)
    }

    fn busy(&self) -> String {
        let waiting = self.slots.iter().flatten().flatten().map(|request| match request {
            InFlight::Range(Planned { action, range, .. }) => format!("{action:?} {range:?}"),
            InFlight::Flush => "flush".into(),
        });
        waiting.collect::<Vec<_>>().join(", ")
    }

    /// Sends requests until the server ends or the load does. Requests in flight stay in their
    /// slots.
    ///
    /// # Errors
    /// A request failed, or a read showed wrong bytes.
    pub fn run(&mut self, load: &Load, depth: usize, mut random: Rng) -> Result<()> {
        let depth = depth.min(usize::from(SLOTS));
        let mut drained_by = None;
        loop {
            // The phase is read before completions are taken: if the server is gone by then, all
            // its completions are there.
            let phase = load.phase();
            if phase < Phase::Draining {
                for queue in 0..self.slots.len() {
                    self.post(queue, depth, load, &mut random);
                }
            }
            if self.take(load)? == 0 {
                match phase {
                    Phase::Gone => return Ok(()),
                    Phase::Draining if !self.is_busy() => return Ok(()),
                    Phase::Draining => {
                        let end = *drained_by.get_or_insert_with(|| Instant::now() + RESUME_LIMIT);
                        ensure!(Instant::now() < end, "no answer: {}", self.busy());
                    }
                    Phase::Running | Phase::Ending => {}
                }
                let queue = &self.driver.queues[0];
                if !queue.arm() {
                    queue.sleep(PAUSE);
                }
            }
        }
    }

    fn place(&self, queue: usize, slot: usize) -> usize {
        self.driver.requests() + (queue * usize::from(SLOTS) + slot) * SLOT
    }

    fn post(&mut self, queue: usize, depth: usize, load: &Load, random: &mut Rng) {
        let mut has_posted = false;
        for slot in 0..depth {
            if self.slots[queue][slot].is_some() {
                continue;
            }
            if load.has_flushes() && random.u8(..32) == 0 {
                self.describe(queue, slot, FLUSH, 0, &[], 0, random);
                self.slots[queue][slot] = Some(InFlight::Flush);
                has_posted = true;
                continue;
            }
            let Some(planned) = load.plan(random, false) else { continue };
            self.describe_range(queue, slot, &planned, random);
            self.slots[queue][slot] = Some(InFlight::Range(planned));
            has_posted = true;
        }
        if has_posted {
            self.driver.queues[queue].publish();
        }
    }

    fn describe_range(&mut self, queue: usize, slot: usize, planned: &Planned, random: &mut Rng) {
        let (start, length) = (planned.range.start, planned.range.end - planned.range.start);
        let sector = start / SECTOR;
        let ranges = |flags: u32| {
            let sectors = (length / SECTOR) as u32;
            [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
        };
        match planned.action {
            Action::Read => self.describe(queue, slot, IN, sector, &[], length as usize, random),
            Action::Write(_) => {
                self.describe(queue, slot, OUT, sector, &planned.data(), 0, random);
            }
            Action::WriteZeroes => {
                let flags = if planned.variant & 1 == 1 { UNMAP } else { 0 };
                self.describe(queue, slot, WRITE_ZEROES, 0, &ranges(flags), 0, random);
            }
            Action::Discard => self.describe(queue, slot, DISCARD, 0, &ranges(0), 0, random),
        }
    }

    /// Writes a request that sends `data`, or receives `wanted` bytes, into a slot's memory.
    #[expect(clippy::too_many_arguments, reason = "the parts of one request")]
    fn describe(
        &mut self,
        queue: usize,
        slot: usize,
        kind: u32,
        sector: u64,
        data: &[u8],
        wanted: usize,
        random: &mut Rng,
    ) {
        let place = self.place(queue, slot);
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        self.driver.memory.write(place, &header);
        self.driver.memory.write(place + STATUS, &[0xee]);
        self.driver.memory.write(place + HEAD, data);
        let (length, flags) = if wanted > 0 { (wanted, WRITE) } else { (data.len(), 0) };
        let mut chain = vec![DescriptorSpec::at(place, 16, 0)];
        // The data is in two buffers, cut at a random byte.
        let cut = if random.bool() { random.usize(..length.max(1)) } else { 0 };
        for part in [0..cut, cut..length] {
            if !part.is_empty() {
                let length = part.len() as u32;
                chain.push(DescriptorSpec::at(place + HEAD + part.start, length, flags));
            }
        }
        chain.push(DescriptorSpec::at(place + STATUS, 1, WRITE));
        let queue = &mut self.driver.queues[queue];
        let head = CHAIN * slot as u16;
        queue.chain(head, &chain);
        queue.add_available(head);
    }

    /// Takes the requests that were completed; returns their number.
    fn take(&mut self, load: &Load) -> Result<usize> {
        let mut taken = 0;
        for queue in 0..self.slots.len() {
            while let Some((head, _)) = self.driver.queues[queue].next_used() {
                taken += 1;
                self.end(load, queue, usize::from(head / CHAIN))?;
            }
        }
        Ok(taken)
    }

    fn end(&mut self, load: &Load, queue: usize, slot: usize) -> Result<()> {
        let place = self.place(queue, slot);
        let request = self.slots[queue][slot].take().context("answered twice")?;
        let mut status = [0];
        self.driver.memory.read(place + STATUS, &mut status);
        let InFlight::Range(planned) = request else {
            ensure!(status == [0], "a flush failed with status {}", status[0]);
            return Ok(());
        };
        let Planned { action, range, token, .. } = planned;
        let mut model = load.model();
        if status != [0] {
            model.lost(token);
            bail!("{action:?} of {}..{} failed: status {}", range.start, range.end, status[0]);
        }
        if action == Action::Read {
            let mut bytes = vec![0; (range.end - range.start) as usize];
            self.driver.memory.read(place + HEAD, &mut bytes);
            return model.has_read(token, &bytes).context("read by the guest under load");
        }
        model.answered(token);
        Ok(())
    }

    /// Reads the whole disk and compares it with the model.
    ///
    /// # Errors
    /// The disk does not have the expected content.
    pub fn read_back(&mut self, load: &Load, random: &mut Rng) -> Result<()> {
        for start in (0..load.size()).step_by(MAX_DATA as usize) {
            let length = MAX_DATA.min(load.size() - start) as usize;
            self.describe(0, 0, IN, start / SECTOR, &[], length, random);
            self.driver.queues[0].publish();
            let answered = self.driver.queues[0].wait_used(RESUME_LIMIT);
            ensure!(answered.is_some_and(|(head, _)| head == 0), "reading at {start}: no answer");
            let place = self.place(0, 0);
            let mut status = [0];
            self.driver.memory.read(place + STATUS, &mut status);
            ensure!(status == [0], "reading at {start} failed: status {}", status[0]);
            let mut bytes = vec![0; length];
            self.driver.memory.read(place + HEAD, &mut bytes);
            load.model().verify(start, &bytes).context("read back by the guest")?;
        }
        Ok(())
    }
}
