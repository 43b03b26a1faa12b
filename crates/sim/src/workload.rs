//! The bounds of an exploration: the number of requests, the disks, and the faults.

use std::time::Duration;

use blockhouse_core::errno;
use fastrand::Rng;

use crate::{Config, Fault, OperationKind, SimDisk, Size};

/// The bounds of an exploration; the seed chooses within them.
#[derive(Clone, Debug)]
pub struct Workload {
    /// The maximum number of tasks that send requests.
    pub tasks: usize,
    /// The maximum number of requests of each task.
    pub requests: usize,
    /// Whether operations may fail.
    pub faults: Faults,
    /// Whether requests may be cancelled.
    pub cancellation: Cancellation,
    /// The maximum number of sectors of the disk.
    pub sectors: usize,
    /// Whether the disk may grow.
    pub growth: Growth,
    /// Whether the disk may be a device.
    pub devices: Devices,
    /// The maximum number of processes that serve the disk one after the other, in explorations
    /// with restarts.
    pub processes: usize,
}

/// Whether the disk grows during the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Growth {
    /// Not in any run.
    Never,
    /// In a quarter of the runs.
    Sometimes,
}

/// Whether operations of the disk fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Faults {
    /// Not in any run.
    Never,
    /// Some operations, in half of the runs.
    Sometimes,
}

/// Whether futures of requests are dropped before they are ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancellation {
    /// Not in any run.
    Never,
    /// Some futures, in half of the runs.
    Sometimes,
}

impl Default for Workload {
    fn default() -> Self {
        Self {
            tasks: 5,
            requests: 12,
            faults: Faults::Sometimes,
            cancellation: Cancellation::Sometimes,
            sectors: 40,
            growth: Growth::Sometimes,
            devices: Devices::Never,
            processes: 6,
        }
    }
}

/// Whether the disk is a device of fixed size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Devices {
    /// It is a file.
    Never,
    /// It is a device in a third of the runs. The image is followed by a little space with random
    /// content.
    Sometimes,
    /// It is such a device in every run.
    Always,
}

impl Workload {
    /// A size for the disk, in bytes.
    pub(crate) fn any_size(&self, random: &mut Rng) -> usize {
        let max_sectors = [self.sectors.div_ceil(5), self.sectors][random.usize(..2)];
        random.usize(2..=max_sectors.max(2)) * 512
    }

    /// Turns the file that holds `image` into a device in some runs: fixes its size and appends
    /// random bytes. Returns whether it did.
    pub(crate) fn any_device(
        &self,
        config: &mut Config,
        image: &mut Vec<u8>,
        size: usize,
        random: &mut Rng,
    ) -> bool {
        let is_device = match self.devices {
            Devices::Never => false,
            Devices::Sometimes => random.u8(..3) == 0,
            Devices::Always => true,
        };
        if is_device {
            config.size = Size::Fixed;
            // The space after the image is up to twice the size of the disk.
            let block = config.alignment.offset.max(4096) as usize;
            let length = (image.len() + random.usize(..2 * size)).next_multiple_of(block);
            image.resize_with(length, || random.u8(..));
        }
        is_device
    }

    /// A probability that a request is cancelled.
    pub(crate) fn any_cancellation(&self, random: &mut Rng) -> f64 {
        match self.cancellation {
            Cancellation::Sometimes if random.bool() => [0.05, 0.4][random.usize(..2)],
            _ => 0.0,
        }
    }
}

/// Operations whose failure does not affect the durability of other data.
pub(crate) const PLAIN_FAULTS: [OperationKind; 5] = [
    OperationKind::Read,
    OperationKind::Write,
    OperationKind::WriteZeroes,
    OperationKind::PrepareZeroes,
    OperationKind::Discard,
];

/// Operations that few systems use. Their faults have a generator of their own, as late operations
/// have: see [`add_late_operations`].
pub(crate) const RARE_FAULTS: [OperationKind; 5] = [
    OperationKind::Resize,
    OperationKind::Lengthen,
    OperationKind::Status,
    OperationKind::Prefetch,
    OperationKind::Close,
];

/// Operations after whose failure any unflushed data may be lost.
pub(crate) const SYNC_FAULTS: [OperationKind; 2] =
    [OperationKind::DurableWrite, OperationKind::Flush];

/// Some of the operations of these kinds fail from now on.
pub(crate) fn add_faults(disk: &SimDisk, kinds: &[OperationKind], random: &mut Rng) {
    let chance = [0.02, 0.2][random.usize(..2)];
    for &kind in kinds {
        if random.bool() {
            let errno = if random.u8(..4) == 0 { errno::ENOSPC } else { errno::EIO };
            disk.fail(Fault::chance(chance, errno).of(kind));
        }
    }
}

/// Delays some operations of the disk in a quarter of the runs, as a stopped server does:
/// operations that began later complete first. `random` is a separate generator, so that a seed
/// keeps its other choices.
pub fn add_late_operations(disk: &SimDisk, random: &mut Rng) {
    if random.u8(..4) != 0 {
        return;
    }
    for _ in 0..random.u8(1..=3) {
        let time = [Duration::from_millis(3), Duration::from_secs(3600)][random.usize(..2)];
        let late = Fault::late(random.u64(..80), time);
        let kind = random.choice([PLAIN_FAULTS.as_slice(), &SYNC_FAULTS, &RARE_FAULTS].concat());
        disk.fail(match kind.filter(|_| random.bool()) {
            Some(kind) => late.of(kind),
            None => late,
        });
    }
}
