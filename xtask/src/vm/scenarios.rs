//! The scenarios as the host sees them: which machine, which job, what to make of the end.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use tempfile::TempDir;

use super::base::Base;
use super::inside::fua::Kinds;
use super::inside::system::FileSystem;
use super::machine::{Bus, Machine, Outcome};
use super::power::on_host::Disk;
use super::power::{Configuration, Layer, MARKS, recovery};

/// Room for a file system of either kind.
const DISK: u64 = 320 << 20;
/// Room for the log of a history, which takes no more than is written.
const POWER_LOG: u64 = 1 << 30;
/// Many times what a job of this kind takes on a busy host: beyond it hangs.
pub const PATIENCE: Duration = Duration::from_secs(600);

/// Requests to the disk for each durable write, beside the bare kernel's.
pub fn fua(base: &Base, kinds: Kinds) -> Result<()> {
    let disks = Disks::new(base)?;
    let mut machine = Machine::new(base, 1536)?;
    for bus in [Bus::Nvme, Bus::Scsi, Bus::Virtio] {
        if bus == Bus::Scsi && kinds == Kinds::OneOfEach {
            continue;
        }
        let name = format!("{bus:?}");
        machine.disk(bus, &name, &disks.empty(&name, DISK)?);
    }
    let kinds = kinds.to_possible_value().context("a kind without a name")?;
    let outcome = machine.run(&format!("xtask inside fua {}", kinds.get_name()), PATIENCE)?;
    passed(&outcome)
}

/// The kernel's NBD client on our server, and what reaches the disk below.
pub fn nbd(base: &Base) -> Result<()> {
    let disks = Disks::new(base)?;
    let mut machine = Machine::new(base, 1024)?;
    machine.disk(Bus::Nvme, "disk", &disks.empty("disk", DISK)?);
    passed(&machine.run("xtask inside nbd disk", PATIENCE)?)
}

/// What is left of acknowledged writes after a loss of power.
pub fn power(base: &Base) -> Result<()> {
    let disks = Disks::new(base)?;
    let mut machine = Machine::new(base, 1024)?;
    let mut job = String::from("set -e\n");
    for configuration in Configuration::value_variants() {
        let name = configuration.name();
        let (disk, log) = (format!("{name}-disk"), format!("{name}-log"));
        let bus = if configuration.has_fua() { Bus::Nvme } else { Bus::Virtio };
        machine.disk(bus, &disk, &disks.empty(&disk, configuration.disk_size())?);
        machine.disk(Bus::Virtio, &log, &disks.empty(&log, POWER_LOG)?);
        job += &format!("xtask inside power-record {name} {disk} {log}\n");
    }
    passed(&machine.run(&job, PATIENCE)?)?;
    // Each keeps one processor busy with tools that start and end.
    std::thread::scope(|scope| {
        let disks = &disks;
        let judge = |configuration: &'static Configuration| {
            scope.spawn(move || judge(base, disks, *configuration))
        };
        let judges: Vec<_> = Configuration::value_variants().iter().map(judge).collect();
        judges.into_iter().try_for_each(|judge| judge.join().expect("judges never panic"))
    })
}

/// Replays the log of a configuration and looks at each mark.
fn judge(base: &Base, disks: &Disks, configuration: Configuration) -> Result<()> {
    let log = disks.path(&format!("{}-log", configuration.name()));
    if configuration.layer() == Layer::File(FileSystem::Xfs) {
        let mut machine = Machine::new(base, 1024)?;
        machine.disk(Bus::Virtio, "log", &log);
        machine.disk(Bus::Virtio, "replayed", &disks.empty("replayed", configuration.disk_size())?);
        machine.disk(Bus::Virtio, "changes", &disks.empty("changes", 64 << 20)?);
        let outcome =
            machine.run("xtask inside power-verify-xfs log replayed changes", PATIENCE)?;
        print!("  {}: {}", configuration.name(), outcome.success()?);
        return Ok(());
    }
    // Copies of several disks must not meet.
    let folder = disks.path(&format!("{}-copies", configuration.name()));
    std::fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let mut disk = Disk::new(configuration, base.packages(), &folder);
    let verdicts = recovery::verdicts(&log, &mut disk)?;
    println!("  {}: {}", configuration.name(), verdicts.describe());
    match configuration {
        Configuration::Control => {
            let is_shown = verdicts.marks >= MARKS && !verdicts.bad.is_empty();
            ensure!(is_shown, "a server that ignores flushes passed: nothing is shown");
        }
        _ => ensure!(verdicts.are_good(), "acknowledged writes were lost"),
    }
    Ok(())
}

/// Prints what the job said; anything but an exit status of 0 is an error.
fn passed(outcome: &Outcome) -> Result<()> {
    print!("{}", outcome.output);
    ensure!(outcome.status == 0, "the job in the guest failed with status {}", outcome.status);
    Ok(())
}

/// Files that are disks of guests; they go when the scenario ends.
pub struct Disks {
    folder: TempDir,
}

impl Disks {
    /// A folder for them, beside everything else that is large.
    pub fn new(base: &Base) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("disks-").tempdir_in(base.cache());
        Ok(Self { folder: folder.context("cannot make a folder for disks")? })
    }

    /// The file of a name.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A new disk of `size` bytes, all zeros, which takes no room yet.
    pub fn empty(&self, name: &str, size: u64) -> Result<PathBuf> {
        let path = self.path(name);
        let make = |path: &Path| File::create(path)?.set_len(size);
        make(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(path)
    }
}
