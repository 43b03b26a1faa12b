//! One connection of the light client: slots with prebuilt requests, batched in both directions.
//!
//! All free slots go out with one `writev`; one `recv` takes as many replies as the kernel has. The
//! receive buffer is small enough for the processor's cache, and only the payloads of samples are
//! read. The connection relies on a server that answers each request once, with simple replies.

use std::io::{IoSlice, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};

use lab_nbd::handshake::{self, Export};
use lab_nbd::pattern;
use lab_nbd::wire::{self, Frame, Operation, REPLY};

/// Size of the receive buffer: it holds several replies of 4 KiB, and fits into a second-level
/// cache.
const INBOX: usize = 256 * 1024;
/// One reply in this many has its data checked.
const SAMPLE_EVERY: u64 = 64;
/// The maximum number of buffers in one `writev`, a limit of the kernel.
const MAX_PIECES: usize = 1024;

/// Whether a call may sleep until the peer sends or receives.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Sleep until there is something.
    Block,
    /// Return at once.
    Never,
}

/// The treatment of replies' data.
#[derive(Clone, Copy, Debug)]
pub enum Check {
    /// The data is ignored: the server does not store any.
    Nothing,
    /// One reply in [`SAMPLE_EVERY`] must hold what belongs to its offset.
    Samples,
    /// Every reply must hold it, with this generation.
    Written(u64),
}

/// The job that a connection does over and over.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    /// Read or write.
    pub operation: Operation,
    /// Bytes in a request.
    pub length: u32,
    /// Requests in flight at a time.
    pub depth: u16,
    /// Marks the data of writes.
    pub generation: u64,
    /// Says what the data of reads must be.
    pub check: Check,
}

/// A request that was answered.
pub struct Completion {
    /// When the request was submitted.
    pub submitted: Instant,
    /// The offset of the request, in bytes.
    pub offset: u64,
}

enum Expect {
    Header,
    Payload { slot: u16, left: usize, sampled: bool },
}

/// A connection and its slots.
pub struct Connection {
    stream: UnixStream,
    job: Job,
    frames: Vec<Frame>,
    submitted: Vec<Option<Instant>>,
    free: Vec<u16>,
    /// Slots to be sent, in order; the first of them may be partly sent.
    unsent: Vec<u16>,
    sent_of_first: usize,
    inbox: Vec<u8>,
    filled: std::ops::Range<usize>,
    expect: Expect,
    sample: Vec<u8>,
    replies: u64,
    verified: u64,
}

impl Connection {
    /// Connects to the export `name` behind `socket` and prepares the requests of `job`.
    pub fn open(socket: &Path, name: &str, job: Job) -> Result<(Self, Export)> {
        let (stream, export) = handshake::open(socket, name)?;
        if job.operation != Operation::Read {
            ensure!(!export.is_read_only(), "the export is read-only");
        }
        if job.operation == Operation::DurableWrite {
            ensure!(export.has_fua(), "the export does not offer FUA");
        }
        let frame = |slot| Frame::new(job.operation, slot, job.length, job.generation);
        let connection = Self {
            stream,
            job,
            frames: (0..job.depth).map(frame).collect(),
            submitted: vec![None; job.depth.into()],
            free: (0..job.depth).collect(),
            unsent: Vec::with_capacity(job.depth.into()),
            sent_of_first: 0,
            inbox: vec![0; INBOX],
            filled: 0..0,
            expect: Expect::Header,
            sample: Vec::with_capacity(job.length as usize),
            replies: 0,
            verified: 0,
        };
        Ok((connection, export))
    }

    /// The number of slots without a request.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Requests that are queued or in flight.
    pub fn busy(&self) -> usize {
        self.frames.len() - self.free.len()
    }

    /// Whether queued requests wait until the socket's buffer has space.
    pub fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// How many replies had their data checked.
    pub fn verified(&self) -> u64 {
        self.verified
    }

    /// The socket, for waiting on several.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Queues one request in every free slot; [`Self::flush`] sends them.
    pub fn submit(&mut self, mut next_offset: impl FnMut() -> u64, now: Instant) {
        for slot in self.free.drain(..) {
            self.frames[usize::from(slot)].set_offset(next_offset());
            self.submitted[usize::from(slot)] = Some(now);
            self.unsent.push(slot);
        }
    }

    /// As [`Self::submit`]; `next` returns an offset and the generation of the data that is written
    /// there.
    pub fn submit_stamped(&mut self, mut next: impl FnMut() -> (u64, u64), now: Instant) {
        for slot in self.free.drain(..) {
            let (offset, generation) = next();
            let frame = &mut self.frames[usize::from(slot)];
            frame.set_generation(generation);
            frame.set_offset(offset);
            self.submitted[usize::from(slot)] = Some(now);
            self.unsent.push(slot);
        }
    }

    /// Sends queued requests until the socket's buffer is full.
    pub fn flush(&mut self) -> Result<()> {
        while !self.unsent.is_empty() {
            match self.send_batch() {
                Ok(0) => bail!("the server takes nothing more"),
                Ok(sent) => self.forget_sent(sent),
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error).context("cannot send"),
            }
        }
        Ok(())
    }

    fn send_batch(&self) -> Result<usize, Errno> {
        let mut skip = self.sent_of_first;
        let pieces: Vec<IoSlice> = self
            .unsent
            .iter()
            .take(MAX_PIECES)
            .map(|&slot| &self.frames[usize::from(slot)].bytes()[std::mem::take(&mut skip)..])
            .map(IoSlice::new)
            .collect();
        let no_descriptors = &mut SendAncillaryBuffer::default();
        sendmsg(&self.stream, &pieces, no_descriptors, SendFlags::DONTWAIT)
    }

    fn forget_sent(&mut self, mut sent: usize) {
        sent += self.sent_of_first;
        let mut whole = 0;
        for &slot in &self.unsent {
            let length = self.frames[usize::from(slot)].bytes().len();
            if sent < length {
                break;
            }
            sent -= length;
            whole += 1;
        }
        self.unsent.drain(..whole);
        self.sent_of_first = sent;
    }

    /// Receives replies and calls `completed` for each answered request.
    pub fn receive(&mut self, wait: Wait, mut completed: impl FnMut(Completion)) -> Result<()> {
        self.inbox.copy_within(self.filled.clone(), 0);
        self.filled = 0..self.filled.len();
        let flags = match wait {
            Wait::Block => RecvFlags::empty(),
            Wait::Never => RecvFlags::DONTWAIT,
        };
        match recv(&self.stream, &mut self.inbox[self.filled.end..], flags) {
            Ok((0, _)) => {
                bail!("the server closed the connection with {} requests open", self.busy())
            }
            Ok((received, _)) => self.filled.end += received,
            Err(Errno::AGAIN) if wait == Wait::Never => return Ok(()),
            Err(Errno::AGAIN) => {
                bail!(
                    "no reply within {} s, {} requests open",
                    handshake::TIMEOUT.as_secs(),
                    self.busy()
                )
            }
            Err(Errno::INTR) => return Ok(()),
            Err(error) => return Err(error).context("cannot receive"),
        }
        while let Some(slot) = self.next_reply()? {
            let submitted = self.submitted[usize::from(slot)].take();
            let submitted = submitted.with_context(|| format!("a second reply for slot {slot}"))?;
            completed(Completion { submitted, offset: self.frames[usize::from(slot)].offset() });
            self.free.push(slot);
        }
        Ok(())
    }

    /// The next slot whose reply has arrived whole.
    fn next_reply(&mut self) -> Result<Option<u16>> {
        loop {
            let data = &self.inbox[self.filled.clone()];
            match &mut self.expect {
                Expect::Header => {
                    let Some(header) = data.first_chunk::<REPLY>() else { return Ok(None) };
                    let cookie = wire::parse_reply(header)?;
                    self.filled.start += REPLY;
                    let slot = u16::try_from(cookie).ok();
                    let slot = slot.filter(|&slot| usize::from(slot) < self.frames.len());
                    let slot =
                        slot.with_context(|| format!("reply with foreign cookie {cookie}"))?;
                    self.replies += 1;
                    if self.job.operation != Operation::Read {
                        return Ok(Some(slot));
                    }
                    let sampled = match self.job.check {
                        Check::Nothing => false,
                        Check::Samples => self.replies.is_multiple_of(SAMPLE_EVERY),
                        Check::Written(_) => true,
                    };
                    self.sample.clear();
                    self.expect = Expect::Payload { slot, left: self.job.length as usize, sampled };
                }
                Expect::Payload { slot, left, sampled } => {
                    let taken = data.len().min(*left);
                    if *sampled {
                        self.sample.extend_from_slice(&data[..taken]);
                    }
                    self.filled.start += taken;
                    *left -= taken;
                    if *left > 0 {
                        return Ok(None);
                    }
                    let (slot, sampled) = (*slot, *sampled);
                    self.expect = Expect::Header;
                    if sampled {
                        self.check_sample(slot)?;
                    }
                    return Ok(Some(slot));
                }
            }
        }
    }

    fn check_sample(&mut self, slot: u16) -> Result<()> {
        let offset = self.frames[usize::from(slot)].offset();
        let generation = match self.job.check {
            Check::Written(generation) => Some(generation),
            Check::Samples | Check::Nothing => None,
        };
        if let Err(what) = pattern::verify(&self.sample, offset, generation) {
            bail!("wrong data: {what}");
        }
        self.verified += 1;
        Ok(())
    }

    /// Ends the connection with `NBD_CMD_DISC`; nothing may be in flight.
    pub fn close(mut self) -> Result<()> {
        ensure!(self.busy() == 0, "closing with {} requests open", self.busy());
        self.stream.write_all(&wire::disconnect()).context("cannot send the farewell")
    }
}
