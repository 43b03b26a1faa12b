//! A guest on a disk that our server on the host offers: what the host sees and does meanwhile.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use super::base::Base;
use super::durable::Watch;
use super::inside::cache::{self, PARTS};
use super::inside::direct::WRITES;
use super::inside::guest::{LARGE, STEPS, TRIMMED, WRITTEN, step};
use super::machine::{Bus, Machine};
use super::scenarios::{Disks, PATIENCE};

/// Room for the guest's file system.
const DISK: u64 = 320 << 20;
/// The disk's size after it has grown.
const GROWN: u64 = DISK + (16 << 20);
/// Behind which steps of the guest's work the server dies.
const DEATHS: [u64; 2] = [STEPS / 6, STEPS / 2];
/// Bytes in what `st_blocks` counts.
const BLOCK: u64 = 512;

/// How a guest gets its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attachment {
    /// By QEMU's NBD client.
    Nbd,
    /// By queues that the server reads itself.
    VhostUser,
}

impl Attachment {
    /// The option of `serve`, and its value for this socket.
    fn export(self, socket: &Path) -> [String; 2] {
        match self {
            Self::Nbd => ["--nbd".into(), format!("nbd+unix:///?socket={}", socket.display())],
            Self::VhostUser => ["--vhost-user-blk".into(), socket.display().to_string()],
        }
    }

    fn attach(self, machine: &mut Machine, socket: &Path) {
        match self {
            Self::Nbd => {
                let seconds = 60;
                let drive = format!(
                    "format=raw,cache=none,discard=unmap,file.driver=nbd,file.server.type=unix,\
                     file.server.path={},file.reconnect-delay={seconds}",
                    socket.display()
                );
                machine.drive(Bus::Virtio, "ours", &drive);
            }
            Self::VhostUser => {
                let seconds = 1;
                let path = socket.display();
                machine
                    .option("-chardev", &format!("socket,id=ours,path={path},reconnect={seconds}"));
                machine.option("-device", "vhost-user-blk-pci,chardev=ours,num-queues=2");
            }
        }
    }

    /// How the guest finds it.
    fn disk(self) -> &'static str {
        match self {
            Self::Nbd => "ours",
            // The server tells the name of the image.
            Self::VhostUser => "image",
        }
    }
}

/// Lives through everything once, and looks again after a reboot.
pub fn run(base: &Base, attachment: Attachment) -> Result<()> {
    let disks = Disks::new(base)?;
    let image = disks.empty("image", DISK)?;
    let socket = disks.path("socket");
    let start = || {
        let mut command = Command::new(base.blockhouse());
        command.arg("serve");
        Server::start(command, attachment, &image, &socket)
    };
    let mut server = start()?;
    let disk = attachment.disk();
    let mut machine = Machine::new(base, 768)?;
    attachment.attach(&mut machine, &socket);
    let mut running = machine.start(&format!("xtask inside guest-first {disk} ext4"), PATIENCE)?;
    running.wait_for(WRITTEN)?;
    let full = allocated(&image)?;
    running.wait_for(TRIMMED)?;
    let trimmed = allocated(&image)?;
    println!("  {attachment:?}: the file took {} KiB, trimmed {} KiB", full >> 10, trimmed >> 10);
    ensure!(trimmed + LARGE * 9 / 10 <= full, "the guest's trim gave no space back to the host");
    for death in DEATHS {
        running.wait_for(&step(death))?;
        server.kill()?;
        server = start()?;
    }
    running.finish()?.success()?;
    println!("  {attachment:?}: lived through {} deaths of its server", DEATHS.len());

    let mut machine = Machine::new(base, 768)?;
    attachment.attach(&mut machine, &socket);
    machine.run(&format!("xtask inside guest-again {disk} ext4"), PATIENCE)?.success()?;
    server.stop()?;
    println!("  {attachment:?}: everything is there after a reboot");
    if attachment == Attachment::VhostUser { grow_and_switch(base, &disks, &image) } else { Ok(()) }
}

/// The disk grows under the guest, which then switches the write cache off and on; what the server
/// makes durable meanwhile is counted.
fn grow_and_switch(base: &Base, disks: &Disks, image: &Path) -> Result<()> {
    let (attachment, socket) = (Attachment::VhostUser, disks.path("socket"));
    let watch = Watch::new(disks.path("calls"));
    let mut command = watch.command(base.blockhouse());
    command.args(["serve", "--engine", "threads"]);
    let server = Server::start(command, attachment, image, &socket)?;
    let mut machine = Machine::new(base, 768)?;
    attachment.attach(&mut machine, &socket);
    let job = format!("xtask inside guest-cache {} {DISK} {GROWN}", attachment.disk());
    let mut running = machine.start(&job, PATIENCE)?;
    running.wait_for(cache::SMALL)?;
    File::options().write(true).open(image)?.set_len(GROWN).context("cannot make it longer")?;
    kill_process(Pid::from_child(&server.child), Signal::HUP)?;
    running.finish()?.success()?;
    server.stop()?;
    println!("  {attachment:?}: grew from {} to {} MiB under the guest", DISK >> 20, GROWN >> 20);
    let starts = [0, 1, 2].map(|part| cache::place(DISK, part));
    let mut is_good = true;
    for (kind, calls) in PARTS.iter().zip(watch.calls(&starts)?) {
        println!("  {attachment:?}: {WRITES} writes, {kind}: {calls:?}");
        // Behind each part with a volatile cache there is one flush: when it is switched off, and the
        // guest's own at the end.
        is_good &= calls.plain + calls.durable == WRITES
            && match *kind {
                "write through" => calls.durable + calls.flushes >= WRITES,
                _ => calls.durable == 0 && calls.flushes == 1,
            };
    }
    ensure!(is_good, "the guest's kind of cache is not the server's");
    Ok(())
}

/// Bytes that the host has set aside for a file.
fn allocated(path: &Path) -> Result<u64> {
    let status = path.metadata().with_context(|| format!("cannot see {}", path.display()))?;
    Ok(status.blocks() * BLOCK)
}

/// `blockhouse serve` on the host; killed when it is dropped.
struct Server {
    child: Child,
    socket: PathBuf,
}

impl Server {
    /// Starts `command`, the program with its first words.
    fn start(
        mut command: Command,
        attachment: Attachment,
        image: &Path,
        socket: &Path,
    ) -> Result<Self> {
        command.arg(image).args(["--format", "raw"]);
        command.args(attachment.export(socket)).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().context("cannot start blockhouse")?;
        let stdout = child.stdout.take().context("the server has no output")?;
        let server = Self { child, socket: socket.to_owned() };
        match BufReader::new(stdout).lines().next() {
            Some(Ok(line)) if line.starts_with("ready ") => Ok(server),
            other => bail!("the server did not get ready: {other:?}"),
        }
    }

    /// A crash.
    fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        std::fs::remove_file(&self.socket).context("cannot remove the socket of the dead")
    }

    /// An end in order.
    fn stop(mut self) -> Result<()> {
        kill_process(Pid::from_child(&self.child), Signal::TERM)?;
        let status = self.child.wait()?;
        ensure!(status.success(), "the server ended with {status}");
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail only when it has ended, as it should have.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
