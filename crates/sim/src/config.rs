//! The abilities of a simulated disk, and its times.

use std::ops::RangeInclusive;
use std::time::Duration;

use blockhouse_core::{Alignment, Fua, FuaCost, GroupCommit, ReadAfterDiscard, WriteCache};
use fastrand::Rng;

/// The properties of a simulated disk.
#[derive(Clone, Debug)]
pub struct Config {
    /// How single writes are made durable.
    pub fua: Fua,
    /// Whether durable writes fail with EOPNOTSUPP although the disk announces native FUA. Some
    /// kernels accept the flag only for reads.
    pub refuses_fua: bool,
    /// The announced cost of a durable write.
    pub fua_cost: FuaCost,
    /// Whether completed writes may be lost in a crash.
    pub write_cache: WriteCache,
    /// The announced number of durable writes from which a shared flush is cheaper than FUA.
    pub group_commit: GroupCommit,
    /// The required alignment of operations. An operation without it makes the simulation panic.
    pub alignment: Alignment,
    /// Whether the disk has zero writes without data.
    pub write_zeroes: Support,
    /// Whether the disk can write zeros without being sent them.
    pub prepare_zeroes: Support,
    /// How many bytes the host reports as free for the disk; `None` if it does not report that.
    pub free_space: Option<u64>,
    /// Whether the disk has discards.
    pub discard: Support,
    /// The content of discarded ranges.
    pub read_after_discard: ReadAfterDiscard,
    /// Whether its size ever changes.
    pub size: Size,
    /// How long operations take.
    pub latency: Latency,
    /// Whether closing a handle releases a resource, so that a closed handle must not be used any
    /// more.
    pub needs_close: bool,
}

/// Whether a disk's size changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// It is a file: writes past its end make it longer.
    Grows,
    /// It is a device: writes past its end fail with ENOSPC, and it cannot be resized.
    Fixed,
}

/// Whether the disk supports an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Support {
    /// The operation works.
    Yes,
    /// The capabilities do not list the operation.
    No,
    /// The capabilities list the operation, but its first use fails.
    FailsOnFirstUse,
}

/// How long operations take, in microseconds of virtual time.
#[derive(Clone, Debug)]
pub struct Latency {
    /// A read or a write.
    pub data: RangeInclusive<u64>,
    /// A flush, and the time that a durable write takes in addition to a write's.
    pub flush: RangeInclusive<u64>,
}

impl Latency {
    /// Fixed latencies, so that operations of one kind end in the order in which they started.
    pub fn fixed(data: u64, flush: u64) -> Self {
        Self { data: data..=data, flush: flush..=flush }
    }

    pub(crate) fn of_data(&self, random: &mut Rng) -> Duration {
        Duration::from_micros(random.u64(self.data.clone()))
    }

    pub(crate) fn of_flush(&self, random: &mut Rng) -> Duration {
        Duration::from_micros(random.u64(self.flush.clone()))
    }
}

impl Default for Config {
    /// A disk that supports everything but preparing zeros, requires no alignment and completes
    /// operations in any order.
    fn default() -> Self {
        Self {
            fua: Fua::Native,
            refuses_fua: false,
            fua_cost: FuaCost::NoFlush,
            write_cache: WriteCache::Volatile,
            group_commit: GroupCommit::Never,
            alignment: Alignment::BYTE,
            write_zeroes: Support::Yes,
            prepare_zeroes: Support::No,
            free_space: None,
            discard: Support::Yes,
            read_after_discard: ReadAfterDiscard::Undefined,
            size: Size::Grows,
            latency: Latency { data: 10..=100, flush: 50..=500 },
            needs_close: true,
        }
    }
}

impl Config {
    /// A disk with random properties.
    pub fn random(random: &mut Rng) -> Self {
        let block = [1, 512, 4096, 8192, 16384, 65536][random.usize(..6)];
        let support = |random: &mut Rng| {
            [Support::Yes, Support::No, Support::FailsOnFirstUse][random.usize(..3)]
        };
        let config = Self {
            fua: if random.bool() { Fua::Native } else { Fua::Emulated },
            refuses_fua: false,
            fua_cost: if random.bool() { FuaCost::NoFlush } else { FuaCost::ExtraFlush },
            write_cache: if random.u8(..8) == 0 { WriteCache::None } else { WriteCache::Volatile },
            group_commit: match random.usize(..4) {
                0 => GroupCommit::Never,
                count => GroupCommit::From(count),
            },
            alignment: Alignment { offset: block, memory: block.min(512) },
            write_zeroes: support(random),
            prepare_zeroes: support(random),
            free_space: [None, Some(0), Some(1 << 30)][random.usize(..3)],
            discard: support(random),
            read_after_discard: if random.bool() {
                ReadAfterDiscard::Zeros
            } else {
                ReadAfterDiscard::Undefined
            },
            size: Size::Grows,
            latency: Latency { data: 1..=100, flush: 1..=300 },
            needs_close: false,
        };
        // Drawn from a copy of the PRNG, so that the other choices of a seed do not change.
        let mut aside = random.clone();
        Self { needs_close: aside.bool(), refuses_fua: aside.u8(..8) == 0, ..config }
    }
}
