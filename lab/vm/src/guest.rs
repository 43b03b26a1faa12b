//! A guest on a disk that our server on the host offers: what the host sees and does meanwhile.

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
use super::in_guest::guest::{
    COPIED, FROZEN, LARGE, SERVER_KILLS, TRIMMED, WORKED, WRITTEN, progress,
};
use super::in_guest::system::FileSystem;
use super::machine::{Bus, Machine, Running, TIMEOUT};
use super::server::{Export, Server};
use super::strace::Strace;
use lab_tools::process::run as run_tool;

/// Room for the guest's file system.
const DISK: u64 = 320 << 20;
/// The disk's size after it has grown.
const GROWN: u64 = DISK + (16 << 20);
/// Bytes in what `st_blocks` counts.
const BLOCK: u64 = 512;
/// MiB of the guest's memory.
const MEMORY: u32 = 1024;
/// By when QEMU must have found a server that was started again.
const RECONNECT: Duration = Duration::from_secs(60);
const RETRY_DELAY: Duration = Duration::from_millis(50);

/// A guest, its disk, and how it gets it.
struct GuestScenario<'a> {
    base: &'a Base,
    disks: Disks,
    image: PathBuf,
    socket: PathBuf,
    export: Export,
    file_system: FileSystem,
}

/// Runs the whole scenario: the first boot, and a second one that finds everything as it was.
pub fn run(base: &Base, export: Export, file_system: FileSystem) -> Result<()> {
    let disks = Disks::new(base)?;
    let (image, socket) = (disks.empty("image", DISK)?, disks.path("socket"));
    let scenario = GuestScenario { base, disks, image, socket, export, file_system };
    scenario.first_boot()?;
    scenario.second_boot()
}

impl GuestScenario<'_> {
    /// A file system, frozen, trimmed, and in use while the server is killed.
    fn first_boot(&self) -> Result<()> {
        let start = || self.serve(Command::new(self.base.blockhouse()), &[]);
        let mut server = start()?;
        let job =
            format!("lab-vm in-guest guest-first {} {}", self.disk(), self.file_system.name());
        let mut running = self.machine()?.start(&job, TIMEOUT)?;
        running.wait_for(FROZEN)?;
        let mut copy = Command::new("cp");
        copy.arg("--sparse=always").arg(&self.image).arg(self.frozen());
        run_tool(copy)?;
        running.send_line(COPIED)?;
        running.wait_for(WRITTEN)?;
        let full = allocated(&self.image)?;
        running.wait_for(TRIMMED)?;
        let trimmed = allocated(&self.image)?;
        self.report(&format!("the file took {} KiB, trimmed {} KiB", full >> 10, trimmed >> 10));
        ensure!(trimmed + LARGE * 9 / 10 <= full, "the guest's trim gave no space back");
        for kill in SERVER_KILLS {
            running.wait_for(&progress(kill))?;
            server.kill()?;
            ensure!(!running.has_printed(WORKED), "the server died too late to be missed");
            server = start()?;
        }
        running.finish()?.success()?;
        server.stop()?;
        self.report(&format!("fio and fsck are content after {} kills", SERVER_KILLS.len()));
        Ok(())
    }

    /// The same disk after a reboot. Then it grows under the guest, which switches the write cache off
    /// and on; what the server makes durable meanwhile is counted.
    fn second_boot(&self) -> Result<()> {
        let strace = Strace::new(self.disks.path("calls"));
        let start = || self.serve(strace.command(self.base.blockhouse()), &["--engine", "threads"]);
        let mut server = start()?;
        let (disk, file_system) = (self.disk(), self.file_system.name());
        let job = format!(
            "set -e\nlab-vm in-guest guest-again {disk} frozen {file_system}\n\
             lab-vm in-guest guest-cache {disk} {DISK} {GROWN}"
        );
        let mut machine = self.machine()?;
        machine.disk(Bus::Virtio, "frozen", &self.frozen());
        let mut running = machine.start(&job, TIMEOUT)?;
        running.wait_for(cache::SMALL)?;
        self.report("everything is there after a reboot, and was when it was frozen");
        let grow = || File::options().write(true).open(&self.image)?.set_len(GROWN);
        match self.export {
            Export::VhostUser => {
                grow().context("cannot make the image longer")?;
                server.look_at_length()?;
            }
            // The protocol tells a client the size when it connects, and QEMU wants to be asked.
            Export::Nbd => {
                server.kill()?;
                grow().context("cannot make the image longer")?;
                server = start()?;
                resize(&running)?;
            }
        }
        running.finish()?.success()?;
        server.stop()?;
        self.report(&format!("grew from {} to {} MiB under the guest", DISK >> 20, GROWN >> 20));
        self.check_durability(&strace)
    }

    /// Whether the server was as durable as the guest was told.
    fn check_durability(&self, strace: &Strace) -> Result<()> {
        let starts = [0, 1, 2].map(|part| cache::place(DISK, part));
        let mut is_good = true;
        for (kind, calls) in PARTS.iter().zip(strace.calls(&starts)?) {
            self.report(&format!(
                "{WRITES} direct writes, {kind}: {} plain, {} with RWF_DSYNC, {} flushes",
                calls.plain, calls.durable, calls.flushes
            ));
            // Behind a part with a volatile cache there may be one flush: when it is switched off, and
            // the guest's own at the end.
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

    fn serve(&self, mut program: Command, options: &[&str]) -> Result<Server> {
        program.arg("serve").arg(&self.image).args(["--format", "raw"]).args(options);
        Server::start(program, self.export, &self.socket)
    }

    /// A machine with the disk.
    fn machine(&self) -> Result<Machine<'_>> {
        let mut machine = Machine::new(self.base, MEMORY)?;
        machine.tools(Tools::WithFio);
        let socket = self.socket.display();
        match self.export {
            Export::Nbd => {
                let seconds = RECONNECT.as_secs();
                let drive = format!(
                    "format=raw,cache=none,discard=unmap,file.driver=nbd,file.server.type=unix,\
                     file.server.path={socket},file.reconnect-delay={seconds}"
                );
                machine.drive(Bus::Virtio, self.disk(), &drive);
            }
            Export::VhostUser => {
                let seconds = 1;
                let chardev = format!("socket,id=ours,path={socket},reconnect={seconds}");
                machine.option("-chardev", &chardev);
                machine.option("-device", "vhost-user-blk-pci,chardev=ours,num-queues=2");
            }
        }
        Ok(machine)
    }

    /// How the guest finds the disk: by its serial number, which over vhost-user is the server's to
    /// tell, and is the name of the image.
    fn disk(&self) -> &'static str {
        "image"
    }

    /// The copy that was made while the file system was frozen.
    fn frozen(&self) -> PathBuf {
        self.disks.path("frozen")
    }
}

/// Tells QEMU that its first drive has grown, as soon as it has seen so itself.
fn resize(running: &Running) -> Result<()> {
    let mut monitor = running.monitor()?;
    let end = Instant::now() + RECONNECT;
    loop {
        let refusal =
            match monitor.command("block_resize", &json!({ "device": "disk0", "size": GROWN })) {
                Ok(()) => return Ok(()),
                Err(refusal) => refusal,
            };
        ensure!(Instant::now() < end, "{refusal:#}");
        std::thread::sleep(RETRY_DELAY);
    }
}

/// Bytes that the host has set aside for a file.
fn allocated(path: &Path) -> Result<u64> {
    let status = path.metadata().with_context(|| format!("cannot see {}", path.display()))?;
    Ok(status.blocks() * BLOCK)
}
