//! `attach` on a kernel without the ublk driver: it makes a device of the kernel's NBD client.
//!
//! Evidence: `attach` says that it uses the NBD client, the device is not removed while it is
//! mounted, the image is intact and unlocked after the removal, and nothing hangs when the server
//! is killed.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, anyhow, ensure};
use rustix::process::{Pid, Signal, kill_process};

use super::system::{self, FileSystem, Mount, tool};
use super::ublk_user::{SIZE, Said, bad, blockhouse, good, image, said_by};
use crate::server::{Export, Server};

const PLACE: &str = "/nbd";

/// Runs all parts. No driver is loaded yet.
pub fn run() -> Result<()> {
    system::load_all(&["crc32c_generic", "ext4"])?;
    std::fs::create_dir_all("/run")?;
    let image = image("n.qcow2")?;
    bad(&["attach", &image], "modprobe nbd")?;
    ensure!(blockhouse(&["check", &image])?.is_good, "the image is held");
    system::load("nbd", "")?;
    let device = attach(&image, &[])?;
    ensure!(system::has_fua(Path::new(&device))?, "the device has no FUA");
    bad(&["attach", &image], "locked")?;
    used(&device)?;
    good(&["detach", &device])?;
    good(&["check", &image])?;
    bad(&["detach", &device], "is not connected")?;
    let device = attach(&image, &["--id", "3", "--read-only"])?;
    ensure!(device == "/dev/nbd3", "another device");
    ensure!(system::read(Path::new("/sys/block/nbd3/ro"))? == "1", "it takes writes");
    taken()?;
    good(&["detach", &device])?;
    killed(&image)?;
    foreign(&image)?;
    as_qemu_nbd(&image)
}

/// A device number in use is refused, and the server that was started for it ends.
fn taken() -> Result<()> {
    let other = image("other.img")?;
    bad(&["attach", &other, "--id", "3"], "cannot make /dev/nbd3")?;
    good(&["resize", &other, &(2 * SIZE).to_string()]).map(drop)
}

fn attach(image: &str, more: &[&str]) -> Result<String> {
    let said = blockhouse(&[&["attach", image], more].concat())?;
    ensure!(said.is_good, "attach failed: {}", said.error);
    println!("  {}: {}", said.output, said.error.lines().last().unwrap_or_default());
    ensure!(said.error.contains("no ublk driver"), "it does not say what it is: {}", said.error);
    Ok(said.output)
}

/// Makes a file system on the device, which cannot be removed while it is mounted.
fn used(device: &str) -> Result<()> {
    let node = Path::new(device);
    FileSystem::Ext4.make(node)?;
    let mount = Mount::at(FileSystem::Ext4, node, Path::new(PLACE))?;
    std::fs::write(mount.place().join("file"), "text")?;
    bad(&["detach", device], "unmount it first")?;
    mount.unmount()?;
    tool("e2fsck", &["-f", "-n", device]).map(drop)
}

/// After its server was killed the device can be removed, and then no request waits.
fn killed(image: &str) -> Result<()> {
    let device = attach(image, &[])?;
    let name = device.trim_start_matches("/dev/");
    let backend = system::read(Path::new(&format!("/sys/block/{name}/backend")))?;
    let socket = backend.split_once(' ').context("no socket")?.1.to_owned();
    let client = std::os::unix::net::UnixStream::connect(&socket)?;
    let server = rustix::net::sockopt::socket_peercred(&client)?.pid;
    drop(client);
    kill_process(Pid::from_raw(server.as_raw_nonzero().get()).context("no server")?, Signal::KILL)?;
    // The kernel lets the read wait if it was sent before the server ended.
    let node = device.clone();
    let reader = std::thread::spawn(move || {
        File::open(&node)?.read_exact_at(&mut vec![0; 1 << 20], SIZE / 2)
    });
    good(&["detach", &device])?;
    let read = reader.join().map_err(|_| anyhow!("the reader panicked"))?;
    ensure!(read.is_err(), "a device without a server was read");
    Ok(())
}

/// Devices of other programs are not removed.
fn foreign(image: &str) -> Result<()> {
    let mut command = Command::new("blockhouse");
    command.args(["serve", image, "--state", "off"]);
    let server = Server::start(command, Export::Nbd, Path::new("/tmp/foreign.sock"))?;
    tool("nbd-client", &["-unix", "/tmp/foreign.sock", "/dev/nbd5"])?;
    bad(&["detach", "/dev/nbd5", "--force"], "another program")?;
    tool("nbd-client", &["-d", "/dev/nbd5"])?;
    server.stop()
}

/// `qemu-nbd -c` and `-d`, with the device of another program, too.
fn as_qemu_nbd(image: &str) -> Result<()> {
    const DEVICE: &str = "/dev/nbd6";
    let connect = |words: &[&str]| {
        let said = qemu_nbd(words)?;
        ensure!(said.is_good && said.output.is_empty(), "{words:?}: {}{}", said.output, said.error);
        Ok(())
    };
    connect(&["-c", DEVICE, image])?;
    let node = Path::new(DEVICE);
    FileSystem::Ext4.make(node)?;
    let mount = Mount::at(FileSystem::Ext4, node, Path::new(PLACE))?;
    std::fs::write(mount.place().join("file"), "text")?;
    let refusal = qemu_nbd(&["-d", DEVICE])?;
    ensure!(!refusal.is_good && refusal.error.contains("unmount it first"), "{}", refusal.error);
    mount.unmount()?;
    // A device that is not connected is no error.
    for _ in 0..2 {
        let said = qemu_nbd(&["-d", DEVICE])?;
        ensure!(said.output == format!("{DEVICE} disconnected"), "{}{}", said.output, said.error);
        good(&["check", image])?;
    }
    let missing = qemu_nbd(&["-d", "/dev/nbd99"])?;
    ensure!(!missing.is_good && missing.error.contains("Cannot open"), "{}", missing.error);
    // A mounted device stays, also if `-d` cannot reach the server's socket.
    const SOCKET: &str = "/tmp/named.sock";
    connect(&["-c", DEVICE, "-k", "named.sock", image])?;
    let mount = Mount::at(FileSystem::Ext4, node, Path::new(PLACE))?;
    std::fs::rename(SOCKET, "/tmp/renamed.sock")?;
    std::fs::write(mount.place().join("file"), "more")?;
    let refusal = qemu_nbd(&["-d", DEVICE])?;
    ensure!(!refusal.is_good && refusal.error.contains("unmount it first"), "{}", refusal.error);
    mount.unmount()?;
    ensure!(qemu_nbd(&[DEVICE, "-d"])?.is_good, "an unused device is refused");
    system::wait_for("the end of the server", || {
        blockhouse(&["check", image]).is_ok_and(|said| said.is_good).then_some(())
    })?;
    connect(&["-t", "--read-only", "--connect=/dev/nbd6", image])?;
    ensure!(system::read(Path::new("/sys/block/nbd6/ro"))? == "1", "it takes writes");
    let mut magic = [0; 2];
    File::open(node)?.read_exact_at(&mut magic, 1080)?;
    ensure!(magic == [0x53, 0xEF], "the file system is gone");
    // The kernel's disconnect is the end of the last client, and of its server.
    tool("nbd-client", &["-d", DEVICE])?;
    system::wait_for("the end of the server", || {
        blockhouse(&["resize", image, "+1M"]).is_ok_and(|said| said.is_good).then_some(())
    })?;
    let mut command = Command::new("blockhouse");
    command.args(["serve", image, "--state", "off"]);
    let server = Server::start(command, Export::Nbd, Path::new("/tmp/other.sock"))?;
    tool("nbd-client", &["-unix", "/tmp/other.sock", DEVICE])?;
    ensure!(qemu_nbd(&["-d", DEVICE])?.is_good, "another program's device stays");
    ensure!(!Path::new("/sys/block/nbd6/pid").exists(), "it is still connected");
    server.stop()
}

/// Runs the program under the name qemu-nbd.
fn qemu_nbd(words: &[&str]) -> Result<Said> {
    let mut command = Command::new("/host/bin/blockhouse");
    command.arg0("qemu-nbd").args(words).current_dir("/tmp").env("LD_LIBRARY_PATH", "/host/lib");
    said_by(command)
}
