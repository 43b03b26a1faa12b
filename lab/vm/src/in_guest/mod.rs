//! The part of `cargo xtask vm` in the guest: the same program, started there by the host's jobs.
//!
//! Nothing here can ask cargo or the host; [`super::base`] has packed all files. A task prints its
//! findings on standard output, one line each, and judges only what cannot be judged from outside.

pub mod attach_nbd;
pub mod cache;
pub mod client;
pub mod debian;
pub mod direct;
pub mod disk;
pub mod fio;
pub mod first_writes;
pub mod fua;
pub mod guest;
pub mod images;
#[cfg(target_arch = "x86_64")]
pub mod injection;
pub mod io_poll;
pub mod lost_writes;
pub mod nbd;
pub mod power;
pub mod report;
pub mod serve;
pub mod services;
pub mod services_kept;
pub mod system;
#[cfg(target_arch = "x86_64")]
pub mod taken_over;
pub mod trace;
pub mod ublk;
pub mod ublk_costs;
pub mod ublk_hostile;
pub mod ublk_nvme;
pub mod ublk_pages;
pub mod ublk_size;
pub mod ublk_user;
pub mod units;
pub mod volume;

use anyhow::{Context, Result};

use super::guest::Changes;
use super::power::CONFIGURATIONS;
use system::FileSystem;

/// The work in the guest.
#[derive(clap::Subcommand)]
pub enum Task {
    /// Count the requests that durable writes become, on every device and file system
    Fua {
        /// On which disks
        disks: Vec<disk::Kind>,
    },
    /// Count the requests that first durable writes become, to space that was prepared
    FirstWrites,
    /// Make a file system on a disk and use it, while the host does things to the disk
    GuestFirst {
        /// The disk's serial number
        disk: String,
        /// The serial number of a disk whose server is killed or upgraded
        killed: String,
        /// The number of kills and upgrades, in all
        changes: u64,
        /// The file system to make on both
        file_system: FileSystem,
    },
    /// Check the file systems of guest-first after a reboot
    GuestAgain {
        /// The disk's serial number
        disk: String,
        /// The serial number of the disk whose server was killed
        killed: String,
        /// The serial number of a copy made while the file system was frozen
        frozen: String,
        /// The file system on them
        file_system: FileSystem,
    },
    /// Wait for a disk to grow, then use the new room with its write cache on, off and on
    GuestCache {
        /// The disk's serial number
        disk: String,
        /// The size in bytes
        from: u64,
        /// The size in bytes after the growth
        to: u64,
    },
    /// Use an image by the kernel's NBD client
    Nbd {
        /// The disk that the image lies on
        disk: String,
    },
    /// Use an image by the kernel's ublk driver
    Ublk {
        /// The disk that the image lies on
        disk: String,
        /// The format
        format: String,
        /// How often its server is killed
        kills: u64,
        /// How often it is upgraded
        upgrades: u64,
    },
    /// Count the system calls of a ublk device's server, and time its start
    UblkCosts {
        /// The disk that the image lies on
        disk: String,
        /// The format
        format: String,
    },
    /// Count how the data of a ublk device moves, and compare it
    UblkPages {
        /// The disk that the images lie on
        disk: String,
    },
    /// Serve ublk devices by NVMe/TCP
    UblkNvme,
    /// Attach an image where the kernel has no ublk driver
    AttachNbd,
    /// Misuse ublk devices as a hostile user could
    UblkHostile,
    /// Count the interrupts of disks whose completions a server polls for
    IoPoll {
        /// The serial number of an NVMe disk
        nvme: String,
        /// The serial number of a virtio disk
        virtio: String,
    },
    /// Fill a thin pool through a server's page cache
    LostWrites {
        /// The disk for the pool
        disk: String,
    },
    /// Become a Debian system, which runs `services`
    Debian {
        /// The disk that has the system's files as an archive
        archive: String,
        /// The disk for these files
        disk: String,
        /// The disk that has our package
        package: String,
        /// The package's size in bytes
        size: u64,
    },
    /// Install our package on that system, use its services, and remove it
    Services,
    /// Let a server write to a disk that logs, and mark each acknowledgement
    PowerRecord {
        /// The configuration: its place among all
        configuration: usize,
        /// The disk to log
        disk: String,
        /// The disk for the log
        log: String,
    },
    /// Replay the log of a disk with XFS, and find the image on it at each mark
    PowerRecoverXfs {
        #[command(flatten)]
        replay: power::Replay,
    },
    /// Replay the log of a volume with a side file, and make an increment at each mark
    PowerRecoverBitmaps {
        #[command(flatten)]
        replay: power::Replay,
        /// The file system on the disk
        file_system: FileSystem,
    },
    /// Make increments of a device of the device mapper, whose server is killed
    Volume {
        /// The disk below it
        disk: String,
        /// How many increments
        increments: u32,
    },
}

/// Runs a task.
pub fn run(task: Task) -> Result<()> {
    match task {
        Task::Fua { disks } => fua::run(&disks),
        Task::FirstWrites => first_writes::run(),
        Task::GuestFirst { disk, killed, changes, file_system } => {
            guest::first(&disk, &killed, changes, file_system)
        }
        Task::GuestAgain { disk, killed, frozen, file_system } => {
            guest::again(&disk, &killed, &frozen, file_system)
        }
        Task::GuestCache { disk, from, to } => cache::run(&disk, from, to),
        Task::Nbd { disk } => nbd::run(&disk),
        Task::Ublk { disk, format, kills, upgrades } => {
            ublk::run(&disk, &format, Changes { kills, upgrades })
        }
        Task::UblkCosts { disk, format } => ublk_costs::run(&disk, &format),
        Task::UblkPages { disk } => ublk_pages::run(&disk),
        Task::UblkNvme => ublk_nvme::run(),
        Task::AttachNbd => attach_nbd::run(),
        Task::UblkHostile => ublk_hostile::run(),
        Task::IoPoll { nvme, virtio } => io_poll::run(&nvme, &virtio),
        Task::LostWrites { disk } => lost_writes::run(&disk),
        Task::Debian { archive, disk, package, size } => {
            debian::prepare(&archive, &disk, (&package, size))
        }
        Task::Services => services::run(),
        Task::PowerRecord { configuration, disk, log } => {
            let configuration = CONFIGURATIONS.get(configuration).context("no such thing")?;
            power::record(*configuration, &disk, &log)
        }
        Task::PowerRecoverXfs { replay } => power::recover_xfs(&replay),
        Task::PowerRecoverBitmaps { replay, file_system } => {
            power::recover_bitmaps(&replay, file_system)
        }
        Task::Volume { disk, increments } => volume::run(&disk, increments),
    }
}
