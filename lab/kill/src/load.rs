//! The requests that a disk gets: of all kinds, sizes and alignments, many to the same clusters.

use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};

use anyhow::Result;
use fastrand::Rng;
use parking_lot::{Mutex, MutexGuard};

use crate::combination::Image;
use crate::model::{Action, Content, Model, Token, fill};

/// Bytes of data in one request, at most.
pub const MAX_DATA: u64 = 128 << 10;
/// Bytes of one zero write or discard, at most.
const MAX_RANGE: u64 = 3 << 20;
const SECTOR: u64 = 512;
/// How often another range is tried if one overlaps a request in flight.
const TRIES: usize = 8;

/// Which requests ask for durability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flushes {
    /// None.
    Never,
    /// Some flushes, and some requests with FUA.
    Sometimes,
}

/// The state of the server, for its clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Phase {
    /// The server runs.
    Running,
    /// Clients send no more requests, and wait for those in flight.
    Draining,
    /// The server ends: from now on, connections may end.
    Ending,
    /// The server's process has ended.
    Gone,
}

/// A request that is about to be sent.
#[derive(Debug)]
pub struct Planned {
    /// The action.
    pub action: Action,
    /// Where.
    pub range: Range<u64>,
    /// The token in the model.
    pub token: Token,
    /// Whether it carries FUA.
    pub is_durable: bool,
    /// A random number, which selects what else the protocol allows in the request.
    pub variant: u8,
}

impl Planned {
    /// The data of a write, if it is one.
    pub fn data(&self) -> Vec<u8> {
        let Action::Write(content) = self.action else { return Vec::new() };
        let mut bytes = vec![0; (self.range.end - self.range.start) as usize];
        if content == Content::Data {
            fill(&mut bytes, self.range.start, self.token.number());
        }
        bytes
    }
}

/// The shared state of a disk's clients.
pub struct Load {
    model: Mutex<Model>,
    size: u64,
    cluster: u64,
    flushes: Flushes,
    phase: AtomicU8,
}

impl Load {
    /// The load of a disk of `image`, whose content is `model`.
    pub fn new(image: &Image, model: Model, flushes: Flushes) -> Self {
        Self {
            size: model.size(),
            model: Mutex::new(model),
            cluster: image.cluster_size(),
            flushes,
            phase: AtomicU8::new(Phase::Running as u8),
        }
    }

    /// The model of the disk.
    pub fn model(&self) -> MutexGuard<'_, Model> {
        self.model.lock()
    }

    /// Bytes of the disk.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether flushes and FUA are part of the load.
    pub fn has_flushes(&self) -> bool {
        self.flushes == Flushes::Sometimes
    }

    /// The server's state.
    pub fn phase(&self) -> Phase {
        let phases = [Phase::Running, Phase::Draining, Phase::Ending, Phase::Gone];
        phases[usize::from(self.phase.load(SeqCst))]
    }

    /// Sets the server's state for all clients.
    pub fn set_phase(&self, phase: Phase) {
        self.phase.store(phase as u8, SeqCst);
    }

    /// Accepts the error of a connection if the server ends or has ended; otherwise returns it.
    pub fn check(&self, error: impl Into<anyhow::Error>) -> Result<()> {
        if self.phase() >= Phase::Ending { Ok(()) } else { Err(error.into()) }
    }

    /// A request of any kind, with a range that no conflicting request in flight overlaps; `None`
    /// if no such range was found. Unless `any_byte`, the range consists of whole sectors.
    pub fn plan(&self, random: &mut Rng, any_byte: bool) -> Option<Planned> {
        let action = match random.u8(..32) {
            0..=7 => Action::Read,
            8..=23 => Action::Write(Content::Data),
            24 => Action::Write(Content::Zero),
            25..=28 => Action::WriteZeroes,
            _ => Action::Discard,
        };
        let max = match action {
            Action::Read | Action::Write(_) => MAX_DATA,
            Action::WriteZeroes | Action::Discard => MAX_RANGE,
        };
        let any_byte = any_byte && random.u8(..12) == 0;
        for _ in 0..TRIES {
            let range = self.range(random, max, any_byte);
            if let Some(token) = self.model().begin(action, range.clone()) {
                let is_durable = self.has_flushes() && random.u8(..8) == 0;
                let variant = random.u8(..);
                return Some(Planned { action, range, token, is_durable, variant });
            }
        }
        None
    }

    fn range(&self, random: &mut Rng, max: u64, any_byte: bool) -> Range<u64> {
        // Sectors, blocks, subclusters, clusters, groups of them.
        let cluster = self.cluster;
        let unit = match random.u8(..8) {
            0 | 1 => SECTOR,
            2 | 3 => 4096,
            4 => (cluster / 32).max(SECTOR),
            7 if 16 * cluster <= self.size => 4 * cluster,
            _ => cluster,
        };
        // Half of all requests are in the first eighth of the disk.
        let reach = if random.bool() { self.size / 8 } else { self.size };
        let start = random.u64(..reach.div_ceil(unit)) * unit;
        let length = (random.u64(1..=3) * unit).min(max);
        let (start, length) = if any_byte {
            (start + random.u64(..unit), length - random.u64(..SECTOR))
        } else {
            (start, length)
        };
        let start = start.min(self.size - SECTOR);
        start..self.size.min(start + length)
    }
}
