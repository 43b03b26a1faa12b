//! The scenarios for which the host only runs machines: their disks and their jobs.

use std::fs::File;
use std::thread;
use std::time::Duration;

use anyhow::Result;

use super::base::{Base, Tools, must_have_everything};
use super::debian;
use super::disks::Disks;
use super::guest::Changes;
use super::in_guest::disk::Kind;
use super::machine::{Bus, Machine, Outcome, TIMEOUT};

/// The limit for jobs that start many programs, which takes most of their time.
const PROGRAMS_TIMEOUT: Duration = Duration::from_secs(3 * TIMEOUT.as_secs());
/// The limit for a whole system that boots, and the work in it.
const SYSTEM_TIMEOUT: Duration = PROGRAMS_TIMEOUT;
/// Bytes of the disk of that system, a sparse file.
const SYSTEM_DISK: u64 = 2 << 30;
const SECTOR: u64 = 512;
/// Bytes of a disk for a file system of either kind.
const DISK: u64 = 320 << 20;
/// Bytes of the volume that incremental backups are made of, and their number.
const VOLUME: u64 = 32 << 20;
const INCREMENTS: u32 = 20;
/// The disks of each of the guests that count in parallel: the slowest disks are in different
/// guests.
const SHARES: [[Kind; 3]; 2] =
    [[Kind::Nvme, Kind::ScsiDebug, Kind::NullBlk], [Kind::Virtio, Kind::Scsi, Kind::NullBlkFua]];

/// Requests to the disk for each durable write, beside the bare kernel's.
pub fn fua(base: &Base) -> Result<()> {
    let disks = Disks::new(base)?;
    let outcomes = thread::scope(|scope| {
        let count = |share: &'static [Kind; 3]| {
            let disks = &disks;
            scope.spawn(move || count(base, disks, share))
        };
        let guests: Vec<_> = SHARES.iter().map(count).collect();
        guests.into_iter().map(|guest| guest.join().expect("guests never panic")).collect()
    });
    let outcomes: Vec<Result<Outcome>> = outcomes;
    outcomes.into_iter().try_for_each(|outcome| passed(outcome?))
}

fn count(base: &Base, disks: &Disks, share: &[Kind]) -> Result<Outcome> {
    let mut machine = Machine::new(base, 1536)?;
    let mut job = String::from("lab-vm in-guest fua");
    for kind in share {
        let name = kind.name();
        job += &format!(" {name}");
        let bus = match kind {
            Kind::Nvme => Bus::Nvme,
            Kind::Scsi => Bus::Scsi,
            Kind::Virtio => Bus::Virtio,
            // Made in the guest.
            Kind::ScsiDebug | Kind::NullBlkFua | Kind::NullBlk => continue,
        };
        machine.disk(bus, name, &disks.empty(name, DISK)?);
    }
    machine.run(&job, TIMEOUT)
}

/// First durable writes to prepared space, on a kernel with `FALLOC_FL_WRITE_ZEROES` and on one
/// without.
pub fn first_writes(base: &Base) -> Result<()> {
    on_each_kernel(base, Tools::Usual, "first-writes", PROGRAMS_TIMEOUT)
}

/// The kernel's NBD client on our server, and the requests to the disk below.
pub fn nbd(base: &Base) -> Result<()> {
    with_disk(base, 1024, DISK, "nbd disk", TIMEOUT)
}

/// The kernel's ublk driver on our server, which is killed and upgraded as `changes` say, and the
/// requests to the disk below, on both kernels: the newer one leaves data in its pages.
pub fn ublk(base: &Base, changes: Changes) -> Result<()> {
    let Changes { kills, upgrades } = changes;
    for kernel in base.kernels()? {
        println!("  {kernel:?} kernel:");
        for format in ["raw", "qcow2"] {
            let disks = Disks::new(base)?;
            let mut machine = Machine::new(base, 1536)?;
            machine.kernel(kernel).tools(Tools::WithFio);
            machine.disk(Bus::Nvme, "disk", &disks.empty("disk", DISK)?);
            let command = format!("lab-vm in-guest ublk disk {format} {kills} {upgrades}");
            passed(machine.run(&command, TIMEOUT)?)?;
        }
    }
    Ok(())
}

/// The cost of a ublk device, on both kernels; of the binary in the archive `optimized`, if there
/// is one.
pub fn ublk_costs(base: &Base, optimized: Option<&[u8]>) -> Result<()> {
    for kernel in base.kernels()? {
        println!("  {kernel:?} kernel:");
        for format in ["raw", "qcow2"] {
            let disks = Disks::new(base)?;
            let mut machine = Machine::new(base, 1536)?;
            machine.kernel(kernel).tools(Tools::WithFio);
            if let Some(archive) = optimized {
                machine.archive(archive);
            }
            machine.disk(Bus::Nvme, "disk", &disks.empty("disk", DISK)?);
            let command = format!("lab-vm in-guest ublk-costs disk {format}");
            passed(machine.run(&command, TIMEOUT)?)?;
        }
    }
    Ok(())
}

/// How the data of a ublk device moves, on both kernels.
pub fn ublk_pages(base: &Base) -> Result<()> {
    for kernel in base.kernels()? {
        println!("  {kernel:?} kernel:");
        let disks = Disks::new(base)?;
        let mut machine = Machine::new(base, 1536)?;
        machine.kernel(kernel);
        machine.disk(Bus::Virtio, "disk", &disks.empty("disk", DISK)?);
        passed(machine.run("lab-vm in-guest ublk-pages disk", PROGRAMS_TIMEOUT)?)?;
    }
    Ok(())
}

/// A ublk device that the kernel serves by NVMe/TCP to the same guest, on both kernels.
pub fn ublk_nvme(base: &Base) -> Result<()> {
    on_each_kernel(base, Tools::WithFio, "ublk-nvme", TIMEOUT)
}

/// Devices of the kernel's ublk driver with users who misuse them, on both kernels.
pub fn ublk_hostile(base: &Base) -> Result<()> {
    on_each_kernel(base, Tools::Usual, "ublk-hostile", PROGRAMS_TIMEOUT)
}

/// `attach` on a kernel that has no ublk driver.
pub fn attach_nbd(base: &Base) -> Result<()> {
    passed(Machine::new(base, 1024)?.run("lab-vm in-guest attach-nbd", PROGRAMS_TIMEOUT)?)
}

/// A server that polls for completions, and the interrupts of the disks below.
pub fn io_poll(base: &Base) -> Result<()> {
    let disks = Disks::new(base)?;
    let mut machine = Machine::new(base, 1024)?;
    machine.disk(Bus::Nvme, "nvme", &disks.empty("nvme", DISK)?);
    machine.disk(Bus::Virtio, "virtio", &disks.empty("virtio", DISK)?);
    passed(machine.run("lab-vm in-guest io-poll nvme virtio", TIMEOUT)?)
}

/// Incremental backups of a device of the device mapper, by bitmaps in a side file.
pub fn volume(base: &Base) -> Result<()> {
    // An incremental backup may have the whole volume, and all of them are in the guest's memory.
    with_disk(base, 2048, VOLUME, &format!("volume disk {INCREMENTS}"), PROGRAMS_TIMEOUT)
}

/// A server whose image is on a thin pool that runs full while the page cache accepts writes.
pub fn lost_writes(base: &Base) -> Result<()> {
    with_disk(base, 1024, DISK, "lost-writes disk", TIMEOUT)
}

/// Our package on a Debian system, whose init is systemd.
pub fn services(base: &Base) -> Result<()> {
    let system = match debian::system(base.cache()) {
        Ok(system) => system,
        Err(error) if must_have_everything() => {
            return Err(error.context("must not be skipped here"));
        }
        Err(error) => {
            println!("vm: skipped: no Debian system: {error:#}");
            return Ok(());
        }
    };
    let disks = Disks::new(base)?;
    let package = debian::package(base.blockhouse(), &disks.path("packages"))?;
    let size = package.metadata()?.len();
    // A disk consists of whole sectors.
    File::options().write(true).open(&package)?.set_len(size.next_multiple_of(SECTOR))?;
    let mut machine = Machine::new(base, 1536)?;
    let system = format!("format=raw,readonly=on,file={}", system.display());
    machine.drive(Bus::Virtio, "system", &system);
    machine.disk(Bus::Virtio, "root", &disks.empty("root", SYSTEM_DISK)?);
    machine.disk(Bus::Virtio, "package", &package);
    let job = format!("lab-vm in-guest debian system root package {size}");
    passed(machine.run(&job, SYSTEM_TIMEOUT)?)
}

/// Runs a job of this program in a guest for each kernel.
fn on_each_kernel(base: &Base, tools: Tools, job: &str, timeout: Duration) -> Result<()> {
    for kernel in base.kernels()? {
        println!("  {kernel:?} kernel:");
        let mut machine = Machine::new(base, 1536)?;
        machine.kernel(kernel).tools(tools);
        passed(machine.run(&format!("lab-vm in-guest {job}"), timeout)?)?;
    }
    Ok(())
}

/// Runs a job of this program in a guest with `memory` MiB and an NVMe disk, whose serial number is
/// `disk`.
fn with_disk(base: &Base, memory: u32, size: u64, job: &str, timeout: Duration) -> Result<()> {
    let disks = Disks::new(base)?;
    let mut machine = Machine::new(base, memory)?;
    machine.disk(Bus::Nvme, "disk", &disks.empty("disk", size)?);
    passed(machine.run(&format!("lab-vm in-guest {job}"), timeout)?)
}

/// Prints the output of the job; any exit status but 0 is an error.
fn passed(outcome: Outcome) -> Result<()> {
    print!("{}", outcome.success()?);
    Ok(())
}
