//! A guest on a disk that our server on the host exports: the host's part.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::base::{Base, Tools};
use super::disks::Disks;
use super::in_guest::cache::{self, PARTS};
use super::in_guest::direct::WRITES;
use super::in_guest::guest::{COPIED, FROZEN, LARGE, TRIMMED, WORKED, WRITTEN, progress};
use super::in_guest::system::FileSystem;
use super::machine::{Bus, Machine, Running, TIMEOUT};
use super::server::{Export, Server, control};
use super::strace::Strace;
use lab_tools::process::run as run_tool;
use tempfile::TempDir;

/// Bytes of the disk of the guest's file system.
const DISK: u64 = 320 << 20;
/// The disk's size after it has grown.
const GROWN: u64 = DISK + (16 << 20);
/// The unit of `st_blocks`, in bytes.
const BLOCK: u64 = 512;
/// MiB of the guest's memory.
const MEMORY: u32 = 1024;
/// The longest time until QEMU connects to a restarted server.
const RECONNECT: Duration = Duration::from_secs(60);
const RETRY_DELAY: Duration = Duration::from_millis(50);

/// A guest, its disks, and how they are exported.
struct GuestScenario<'a> {
    base: &'a Base,
    disks: Disks,
    /// A raw image that is copied, trimmed and made longer while the guest uses it.
    plain: ServedImage,
    /// A qcow2 image whose server is killed and upgraded.
    killed: ServedImage,
    changes: Changes,
    /// The folder in memory of the servers' state files.
    state: TempDir,
    export: Export,
    file_system: FileSystem,
}

/// An image on the host with its own server. The guest finds the disk by its serial number: over
/// vhost-user the server reports it, the name of the image.
struct ServedImage {
    name: &'static str,
    format: &'static str,
    path: PathBuf,
    socket: PathBuf,
}

impl ServedImage {
    fn new(disks: &Disks, name: &'static str, format: &'static str) -> Self {
        let (path, socket) = (disks.path(name), disks.path(&format!("{name}.socket")));
        Self { name, format, path, socket }
    }
}

/// How often a server is killed, and upgraded.
#[derive(Clone, Copy, Debug)]
pub struct Changes {
    /// How often it is killed and started again.
    pub kills: u64,
    /// How often it is upgraded.
    pub upgrades: u64,
}

/// A change of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Kill,
    Upgrade,
}

impl Changes {
    /// All changes: kills and upgrades alternate while there are both.
    fn all(self) -> Vec<Change> {
        let turns = 0..self.kills.max(self.upgrades);
        let both = turns.flat_map(|turn| {
            let upgrade = (turn < self.upgrades).then_some(Change::Upgrade);
            let kill = (turn < self.kills).then_some(Change::Kill);
            [upgrade, kill]
        });
        both.flatten().collect()
    }
}

/// Runs the whole scenario: the first boot, during which a server is killed and upgraded several
/// times, and a second boot that must find everything as it was.
pub fn run(base: &Base, export: Export, file_system: FileSystem, changes: Changes) -> Result<()> {
    let disks = Disks::new(base)?;
    let plain = ServedImage::new(&disks, "plain", "raw");
    let killed = ServedImage::new(&disks, "killed", "qcow2");
    disks.empty(plain.name, DISK)?;
    let mut create = Command::new(base.blockhouse());
    create.args(["create", "--format", "qcow2"]).arg(&killed.path).arg(DISK.to_string());
    run_tool(create)?;
    let state = tempfile::Builder::new().prefix("vm-state-").tempdir_in("/dev/shm")?;
    let scenario =
        GuestScenario { base, disks, plain, killed, changes, state, export, file_system };
    scenario.first_boot()?;
    scenario.second_boot()
}

impl GuestScenario<'_> {
    /// The first boot: a file system is frozen, trimmed, and in use while the server is killed and
    /// upgraded.
    fn first_boot(&self) -> Result<()> {
        let start = |image| self.serve(image, Command::new(self.base.blockhouse()), &[]);
        let plain = start(&self.plain)?;
        let mut server = start(&self.killed)?;
        let job = format!(
            "lab-vm in-guest guest-first {} {} {} {}",
            self.plain.name,
            self.killed.name,
            self.changes.all().len(),
            self.file_system.name()
        );
        let mut running = self.machine()?.start(&job, TIMEOUT)?;
        running.wait_for(FROZEN)?;
        let mut copy = Command::new("cp");
        copy.arg("--sparse=always").arg(&self.plain.path).arg(self.frozen());
        run_tool(copy)?;
        running.send_line(COPIED)?;
        running.wait_for(WRITTEN)?;
        let full = allocated(&self.plain.path)?;
        running.wait_for(TRIMMED)?;
        let trimmed = allocated(&self.plain.path)?;
        self.report(&format!("the file took {} KiB, trimmed {} KiB", full >> 10, trimmed >> 10));
        ensure!(trimmed + LARGE * 9 / 10 <= full, "the guest's trim gave no space back");
        let started = Instant::now();
        let mut gaps = Vec::new();
        for (number, change) in (1..).zip(self.changes.all()) {
            running.wait_for(&progress(number))?;
            server = match change {
                Change::Upgrade => {
                    gaps.push(server.upgrade(self.base.blockhouse())?);
                    server
                }
                Change::Kill => {
                    server.kill()?;
                    start(&self.killed)?
                }
            };
            ensure!(!running.has_printed(WORKED), "too late to be missed: {change:?}");
        }
        running.wait_for(WORKED)?;
        let time = started.elapsed().as_secs_f64();
        running.finish()?.success()?;
        server.stop()?;
        plain.stop()?;
        self.check_killed()?;
        let Changes { kills, upgrades } = self.changes;
        gaps.sort_by(f64::total_cmp);
        let longest = gaps.last().map_or(0.0, |gap| *gap);
        self.report(&format!(
            "fio and fsck are content after {kills} kills and {upgrades} upgrades (pauses up to {longest:.1} ms) in \
             {time:.1} s"
        ));
        Ok(())
    }

    /// Checks that the image whose server was killed has at most leaks.
    fn check_killed(&self) -> Result<()> {
        let check = Command::new("qemu-img").args(["check", "-q"]).arg(&self.killed.path).status();
        let code = check.context("cannot start qemu-img")?.code();
        ensure!(matches!(code, Some(0 | 3)), "qemu-img check of the killed image: {code:?}");
        Ok(())
    }

    /// The second boot, with the same disk. Then the disk grows while the guest uses it, and the
    /// guest switches the write cache off and on; the server's durable operations during that time
    /// are counted.
    fn second_boot(&self) -> Result<()> {
        let strace = Strace::new(self.disks.path("calls"));
        let traced = ["--engine", "threads"];
        let start = || self.serve(&self.plain, strace.command(self.base.blockhouse()), &traced);
        let mut server = start()?;
        let killed = self.serve(&self.killed, Command::new(self.base.blockhouse()), &[])?;
        let (disk, file_system) = (self.plain.name, self.file_system.name());
        let other = self.killed.name;
        let job = format!(
            "set -e\nlab-vm in-guest guest-again {disk} {other} frozen {file_system}\n\
             lab-vm in-guest guest-cache {disk} {DISK} {GROWN}"
        );
        let mut machine = self.machine()?;
        machine.disk(Bus::Virtio, "frozen", &self.frozen());
        let mut running = machine.start(&job, TIMEOUT)?;
        running.wait_for(cache::SMALL)?;
        self.report("everything is there after a reboot, and was when it was frozen");
        let grow = || File::options().write(true).open(&self.plain.path)?.set_len(GROWN);
        match self.export {
            Export::VhostUser => {
                grow().context("cannot make the image longer")?;
                server.look_at_length()?;
            }
            // A client learns the size only when it connects, and QEMU must be told to resize its
            // drive.
            Export::Nbd => {
                server.kill()?;
                grow().context("cannot make the image longer")?;
                server = start()?;
                resize(&running)?;
            }
        }
        running.finish()?.success()?;
        server.stop()?;
        killed.stop()?;
        self.check_killed()?;
        self.report(&format!("grew from {} to {} MiB under the guest", DISK >> 20, GROWN >> 20));
        self.check_durability(&strace)
    }

    /// Checks that the server made durable what the guest's cache setting demands.
    fn check_durability(&self, strace: &Strace) -> Result<()> {
        let starts = [0, 1, 2].map(|part| cache::place(DISK, part));
        let mut is_good = true;
        for (kind, calls) in PARTS.iter().zip(strace.calls(&starts)?) {
            self.report(&format!(
                "{WRITES} direct writes, {kind}: {} plain, {} with RWF_DSYNC, {} flushes",
                calls.plain, calls.durable, calls.flushes
            ));
            // After a part with a volatile cache there may be one flush: when the cache is switched
            // off, or the guest's own flush at the end.
            is_good &= calls.plain + calls.durable == WRITES
                && match *kind {
                    "write through" => calls.durable + calls.flushes >= WRITES,
                    _ => calls.durable == 0 && calls.flushes <= 1,
                };
        }
        ensure!(is_good, "the guest's kind of cache is not the server's");
        Ok(())
    }

    fn report(&self, line: &str) {
        println!("  {:?}, {}: {line}", self.export, self.file_system.name());
    }

    fn serve(&self, image: &ServedImage, mut program: Command, options: &[&str]) -> Result<Server> {
        program.arg("serve").arg(&image.path).args(["--format", image.format]);
        program.arg("--state").arg(self.state.path().join("state")).args(options);
        program.arg("--control").arg(control(&image.socket));
        Server::start(program, self.export, &image.socket)
    }

    /// A machine with both disks. [`resize`] relies on QEMU's name of the first one.
    fn machine(&self) -> Result<Machine<'_>> {
        let mut machine = Machine::new(self.base, MEMORY)?;
        machine.tools(Tools::WithFio);
        for ServedImage { name, socket, .. } in [&self.plain, &self.killed] {
            let socket = socket.display();
            match self.export {
                Export::Nbd => {
                    let seconds = RECONNECT.as_secs();
                    let drive = format!(
                        "format=raw,cache=none,discard=unmap,file.driver=nbd,\
                         file.server.type=unix,file.server.path={socket},\
                         file.reconnect-delay={seconds}"
                    );
                    machine.drive(Bus::Virtio, name, &drive);
                }
                Export::VhostUser => {
                    let seconds = 1;
                    let chardev = format!("socket,id={name},path={socket},reconnect={seconds}");
                    machine.option("-chardev", &chardev);
                    let device = format!("vhost-user-blk-pci,chardev={name},num-queues=2");
                    machine.option("-device", &device);
                }
            }
        }
        Ok(machine)
    }

    /// The path of the copy that was made while the file system was frozen.
    fn frozen(&self) -> PathBuf {
        self.disks.path("frozen")
    }
}

/// Tells QEMU to resize its first drive, as soon as QEMU has connected to the server with the new
/// size.
fn resize(running: &Running) -> Result<()> {
    let mut monitor = running.monitor()?;
    let end = Instant::now() + RECONNECT;
    loop {
        let refusal =
            match monitor.command("block_resize", &json!({ "device": "disk0", "size": GROWN })) {
                Ok(_) => return Ok(()),
                Err(refusal) => refusal,
            };
        ensure!(Instant::now() < end, "{refusal:#}");
        std::thread::sleep(RETRY_DELAY);
    }
}

/// Bytes that the host has allocated for a file.
fn allocated(path: &Path) -> Result<u64> {
    let status = path.metadata().with_context(|| format!("cannot see {}", path.display()))?;
    Ok(status.blocks() * BLOCK)
}
