//! The bounds of an exploration: the number of requests, the disks, and the faults.

use std::time::Duration;

use blockhouse_core::errno;
use fastrand::Rng;

use crate::{Config, Fault, OperationKind, SimDisk, Size};

/// The bounds of an exploration; the seed chooses within them.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Tasks that send requests, at most.
    pub tasks: usize,
    /// Requests of each task, at most.
    pub requests: usize,
    /// Whether operations may fail.
    pub faults: Faults,
    /// Whether requests may be cancelled.
    pub cancellation: Cancellation,
    /// Sectors of the disk, at most.
    pub sectors: usize,
    /// Whether the disk may grow.
    pub growth: Growth,
    /// Whether it may be a device.
    pub devices: Devices,
    /// Processes that come one after the other, at most, where they do.
    pub processes: usize,
}

/// Whether the disk becomes longer meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Growth {
    /// It does not.
    Never,
    /// In a quarter of the runs it does.
    Sometimes,
}

/// Whether operations of the disk fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Faults {
    /// They do not.
    Never,
    /// In half of the runs some do.
    Sometimes,
}

/// Whether futures of requests are dropped before they are ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancellation {
    /// They are not.
    Never,
    /// In half of the runs some are.
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
    /// In a third of the runs it is a device, with little room after the image and anything in it.
    Sometimes,
    /// It is such a device.
    Always,
}

impl Workload {
    /// A size for the disk, in bytes.
    pub(crate) fn any_size(&self, random: &mut Rng) -> usize {
        let most_sectors = [self.sectors.div_ceil(5), self.sectors][random.usize(..2)];
        random.usize(2..=most_sectors.max(2)) * 512
    }

    /// Sometimes makes a device of the file with this image.
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
            // Room for some, all, or more than all of the disk once more.
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

/// Operations that fail without a word on what else is stable.
pub(crate) const PLAIN_FAULTS: [OperationKind; 5] = [
    OperationKind::Read,
    OperationKind::Write,
    OperationKind::WriteZeroes,
    OperationKind::PrepareZeroes,
    OperationKind::Discard,
];

/// Operations of few systems: their failures are drawn apart, as what takes long.
pub(crate) const RARE_FAULTS: [OperationKind; 4] = [
    OperationKind::Resize,
    OperationKind::Lengthen,
    OperationKind::Status,
    OperationKind::Prefetch,
];

/// Operations whose failure says that anything that was written before may be lost.
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

/// In a quarter of the runs some operations of the disk take long, as those of a server that is
/// stopped for a while: others that began later end before them. `random` is a generator of its
/// own, so that the other runs are what they would be without them.
pub(crate) fn add_late_operations(disk: &SimDisk, random: &mut Rng) {
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
