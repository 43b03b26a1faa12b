//! Loss of power, the host's part: guests record logs, and the host or other guests check them.

use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::mark_images::{self, ImageSlots};
use super::on_host::{Disk, Qcow2};
use super::recovery::{Verdicts, verdicts};
use super::{Bitmaps, CONFIGURATIONS, Configuration, Fua, Layer, MARKS};
use crate::base::Base;
use crate::disks::Disks;
use crate::in_guest::system::FileSystem;
use crate::machine::{Bus, Machine, TIMEOUT};

/// Bytes of the disk for the log of a history; the file is sparse.
const LOG: u64 = 1 << 30;
const MEMORY: u32 = 1024;
/// How many guests record side by side.
const GUESTS: usize = 2;

/// Checks in every configuration with these bitmaps that acknowledged writes and the bitmaps
/// survive a loss of power.
pub fn run(base: &Base, bitmaps: Bitmaps) -> Result<()> {
    let disks = Disks::new(base)?;
    let outcomes: Vec<_> = thread::scope(|scope| {
        let disks = &disks;
        let guest = |first| {
            let all = Configuration::with(bitmaps).into_iter();
            let chosen: Vec<_> = all.skip(first).step_by(GUESTS).collect();
            scope.spawn(move || {
                record(base, disks, &chosen)?;
                // Each check keeps one processor busy with tools that start and end.
                let start = |index| (index, scope.spawn(move || check_log(base, disks, index)));
                anyhow::Ok(chosen.into_iter().map(start).collect::<Vec<_>>())
            })
        };
        let guests: Vec<_> = (0..GUESTS).map(guest).collect();
        let mut outcomes = Vec::new();
        for guest in guests {
            for (index, outcome) in guest.join().expect("guests never panic")? {
                outcomes.push((index, outcome.join().expect("checks never panic")));
            }
        }
        outcomes.sort_by_key(|(index, _)| *index);
        anyhow::Ok(outcomes)
    })?;
    let mut wrong = Vec::new();
    for (index, outcome) in outcomes {
        let configuration = CONFIGURATIONS[index];
        let (name, verdicts) = (configuration.name(), outcome?);
        println!("  {name:45} {}", verdicts.describe());
        if !matches_expectation(configuration, &verdicts) {
            wrong.push(name);
        }
    }
    ensure!(wrong.is_empty(), "not as it should be: {}", wrong.join("; "));
    Ok(())
}

/// Whether the verdicts are as expected. A server that ignores flushes must lose something, or the
/// test proves nothing about the others.
fn matches_expectation(configuration: Configuration, verdicts: &Verdicts) -> bool {
    if configuration.is_control() {
        verdicts.marks >= MARKS && !verdicts.bad.is_empty()
    } else {
        verdicts.are_good()
    }
}

/// The names of a configuration's disk and of the disk for its log.
fn names(index: usize) -> [String; 2] {
    [format!("disk-{index}"), format!("log-{index}")]
}

/// Lets a guest go through the history in each of these configurations.
fn record(base: &Base, disks: &Disks, chosen: &[usize]) -> Result<()> {
    let mut machine = Machine::new(base, MEMORY)?;
    let mut job = String::from("set -e\n");
    for index in chosen {
        let [disk, log] = names(*index);
        let configuration = CONFIGURATIONS[*index];
        let bus = if configuration.fua == Fua::Taken { Bus::Nvme } else { Bus::Virtio };
        machine.disk(bus, &disk, &disks.empty(&disk, configuration.disk_size())?);
        machine.disk(Bus::Virtio, &log, &disks.empty(&log, LOG)?);
        job += &format!("lab-vm in-guest power-record {index} {disk} {log}\n");
    }
    machine.run(&job, TIMEOUT)?.success().map(drop)
}

/// Replays the log of a configuration and looks at each mark.
fn check_log(base: &Base, disks: &Disks, index: usize) -> Result<Verdicts> {
    let configuration = CONFIGURATIONS[index];
    let [_, log] = names(index);
    let log = disks.path(&log);
    // A folder for each configuration, so that copies of several disks do not overwrite each other.
    let folder = disks.path(&format!("copies-{index}"));
    std::fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let writes = configuration.writes();
    let is_qcow2 = configuration.format == "qcow2";
    if let (Layer::File(file_system), Bitmaps::SideFile) =
        (configuration.layer, configuration.bitmaps)
    {
        let file_system = file_system.name();
        let job = format!("lab-vm in-guest power-recover-bitmaps {REPLAY} {file_system}");
        return verdicts(&log, writes, &mut recovered(base, disks, (index, &log), &job)?);
    }
    if configuration.layer == Layer::File(FileSystem::Xfs) {
        let job = format!("lab-vm in-guest power-recover-xfs {REPLAY}");
        let mut on = recovered(base, disks, (index, &log), &job)?;
        return if is_qcow2 {
            verdicts(&log, writes, &mut Qcow2 { on, folder })
        } else {
            verdicts(&log, writes, &mut on)
        };
    }
    let mut on = Disk::new(configuration, base.packages(), &folder);
    if is_qcow2 {
        verdicts(&log, writes, &mut Qcow2 { on, folder })
    } else {
        verdicts(&log, writes, &mut on)
    }
}

/// The disks of a replay.
const REPLAY: &str = "log replayed changes found";
/// Long, because several programs start at each mark.
const REPLAY_TIMEOUT: Duration = Duration::from_secs(4 * TIMEOUT.as_secs());

/// The images that a guest finds with this job.
fn recovered(
    base: &Base,
    disks: &Disks,
    (index, log): (usize, &Path),
    job: &str,
) -> Result<ImageSlots> {
    let mut machine = Machine::new(base, MEMORY)?;
    machine.disk(Bus::Virtio, "log", log);
    let empty = |name: &str, size| disks.empty(&format!("{name}-{index}"), size);
    let size = CONFIGURATIONS[index].disk_size();
    machine.disk(Bus::Virtio, "replayed", &empty("replayed", size)?);
    machine.disk(Bus::Virtio, "changes", &empty("changes", 64 << 20)?);
    let file = empty("found", mark_images::DISK)?;
    machine.disk(Bus::Virtio, "found", &file);
    print!("{}", machine.run(job, REPLAY_TIMEOUT)?.success()?);
    let file = std::fs::File::open(&file);
    Ok(ImageSlots::new(file.context("cannot open what the guest found")?))
}
