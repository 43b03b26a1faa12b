//! Our disk as a block device of the guest's own kernel (ublk), over raw and qcow2 images.
//!
//! Evidence: durable writes in a file system on the device cause the same number of FUA writes to
//! the disk below, and nothing else. fio finds what it wrote, also while the server is killed and
//! restarted, and upgraded. Zeros and discards arrive, the file system is intact, and the device is
//! gone when the server has ended. An idle server makes no system calls.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::fs::{FallocateFlags, fallocate};

use super::direct::{self, BLOCK, Caching, WRITES, WriteMethod};
use super::fio::{self, Fio, Work};
use super::images::{State, make_written};
use super::system::{self, FileSystem, Mount, tool};
use super::trace::{self, Counts};
use crate::guest::Changes;
use crate::server::{Server, control};

/// Bytes of the device, enough for a file system and fio's file.
const SIZE: u64 = 64 << 20;
const DEVICE: &str = "/dev/ublkb0";
const PLACE: &str = "/ublk";
const BYTES: u64 = WRITES * BLOCK as u64;
/// The time between two looks at a server's processor time.
const LOOK: Duration = Duration::from_millis(100);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Uses an image of this format on the disk whose serial number is `serial`; its server is killed
/// and upgraded as `changes` say.
pub fn run(serial: &str, format: &str, changes: Changes) -> Result<()> {
    system::load_nvme()?;
    system::load_all(&["crc32c_generic", "ext4"])?;
    no_driver()?;
    system::load("ublk_drv", "")?;
    let (disk, mount) = Mount::new_ext4(serial)?;
    trace::prepare()?;
    let image = make_written(mount.place(), format, SIZE)?;
    let mut server = serve(&image, format)?;
    look(format)?;
    count(&disk, format)?;
    discard(&image)?;
    server = kill(server, &image, format, changes.kills)?;
    server = upgrade(server, &image, format, changes.upgrades)?;
    strangers(mount.place(), &image, format)?;
    sleeps(&server)?;
    server.stop()?;
    ensure!(!Path::new(DEVICE).exists(), "{DEVICE} is there after its server has ended");
    if format == "qcow2" {
        tool("blockhouse", &["check", &image.display().to_string()])?;
    }
    println!("  {format}: removed");
    mount.unmount()
}

/// The command line of a server of `image`.
fn command(image: &Path, format: &str) -> Command {
    let mut command = Command::new("blockhouse");
    command.arg("serve").arg(image).args(["--format", format, "--state", "/tmp/state"]);
    command
}

fn serve(image: &Path, format: &str) -> Result<Server> {
    let mut command = command(image, format);
    command.arg("--control").arg(control(Path::new(DEVICE)));
    let server = Server::start_ublk(command, Path::new(DEVICE))?;
    system::disk("ublkb0")?;
    Ok(server)
}

/// Starts a server that must fail; returns the last line of its standard error.
fn refused(mut command: Command, words: &[&str]) -> Result<String> {
    let output = command.args(words).output().context("cannot start blockhouse")?;
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    ensure!(!output.status.success(), "a server that should be refused serves");
    Ok(said.lines().last().unwrap_or_default().to_owned())
}

/// Without the driver the server prints one line, which says what to do.
fn no_driver() -> Result<()> {
    let image = Path::new("/tmp/none");
    File::create(image)?.set_len(SIZE)?;
    let line = refused(command(image, "raw"), &["--ublk"])?;
    println!("  without the driver: {line}");
    ensure!(line.contains("modprobe ublk_drv"), "it does not say what to do: {line}");
    Ok(())
}

/// Checks the kernel's attributes of the device.
fn look(format: &str) -> Result<()> {
    let attribute = |name: &str| system::read(Path::new(&format!("/sys/block/ublkb0/{name}")));
    let found = |names: &[&str]| -> Result<Vec<String>> {
        names.iter().map(|name| Ok(format!("{}={}", name, attribute(name)?))).collect()
    };
    let all = found(&[
        "size",
        "ro",
        "queue/fua",
        "queue/write_cache",
        "queue/logical_block_size",
        "queue/physical_block_size",
        "queue/discard_granularity",
        "queue/discard_max_bytes",
        "queue/write_zeroes_max_bytes",
        "queue/max_sectors_kb",
    ])?;
    println!("  {format}: {}", all.join(" "));
    ensure!(attribute("size")? == (SIZE / 512).to_string(), "another size");
    ensure!(attribute("queue/fua")? == "1", "no FUA");
    ensure!(attribute("queue/write_cache")? == "write back", "no write cache");
    Ok(())
}

/// Counts the requests of durable writes, on the device and in a file system on it.
fn count(disk: &Path, format: &str) -> Result<()> {
    let device = Path::new(DEVICE);
    let only_fua = Counts { fua: WRITES as u32, bytes: BYTES, ..Counts::default() };
    FileSystem::Ext4.make(device)?;
    let mount = Mount::at(FileSystem::Ext4, device, Path::new(PLACE))?;
    let file = State::RawWritten.make(mount.place(), "inner")?;
    let write = |method| direct::run(&file, method, Caching::Direct);
    // The first writes cause writes of metadata: of the outer file system and of the image.
    write(WriteMethod::Each)?;
    let counts = trace::count_synced(disk, || write(WriteMethod::Each))?;
    expect(format, "20 durable writes in ext4", counts, counts == only_fua)?;
    let counts = trace::count_synced(disk, || write(WriteMethod::FlushOnce))?;
    let plain = WRITES as u32;
    let one_flush = Counts { plain, flushes: 1, bytes: BYTES, ..Counts::default() };
    expect(format, "20 writes and one flush in ext4", counts, counts == one_flush)?;
    tool("fstrim", &[PLACE])?;
    mount.unmount()?;
    tool("e2fsck", &["-f", "-n", DEVICE]).map(drop)
}

fn expect(format: &str, what: &str, counts: Counts, good: bool) -> Result<()> {
    println!("  {format}: {what}: {counts}");
    ensure!(good, "{format}: {what}: the disk below the server got {counts}");
    Ok(())
}

/// A discard frees space of the image, and reads as zeros; so do zero writes.
fn discard(image: &Path) -> Result<()> {
    use std::os::unix::fs::MetadataExt;
    let device = File::options().read(true).write(true).open(DEVICE)?;
    let allocated = || Ok::<_, anyhow::Error>(image.metadata()?.blocks() * 512);
    let (offset, length) = (SIZE / 2, 8 << 20);
    device.write_all_at(&vec![0x77; length], offset)?;
    device.sync_all()?;
    let before = allocated()?;
    tool("blkdiscard", &["-o", &offset.to_string(), "-l", &length.to_string(), DEVICE])?;
    device.sync_all()?;
    let given_back = before.saturating_sub(allocated()?);
    println!("  discard of {length} bytes: {given_back} given back");
    ensure!(given_back >= length as u64 * 9 / 10, "the discard gave nothing back");
    let zeros = |what: &str| {
        let mut bytes = vec![1; length];
        device.read_exact_at(&mut bytes, offset)?;
        ensure!(bytes.iter().all(|byte| *byte == 0), "{what} read as something else");
        Ok(())
    };
    zeros("discarded bytes")?;
    device.write_all_at(&vec![0x78; length], offset)?;
    let zero_range = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
    fallocate(&device, zero_range, offset, length as u64).context("cannot write zeros")?;
    zeros("written zeros")
}

/// Runs fio in a file system on the device, while the server is killed and restarted. The file
/// system is intact, and all data is there.
fn kill(server: Server, image: &Path, format: &str, kills: u64) -> Result<Server> {
    let kill = |server: Server| {
        server.kill()?;
        serve(image, format)
    };
    let server = through(server, kills, kill)?;
    println!(
        "  {format}: fio found what it wrote, through {kills} kills; the file system is whole"
    );
    Ok(server)
}

/// The same while the server is upgraded. At the end another server runs, which is a child of this
/// process.
fn upgrade(server: Server, image: &Path, format: &str, upgrades: u64) -> Result<Server> {
    let mut gaps = Vec::new();
    let upgrade = |mut server: Server| {
        gaps.push(server.upgrade(Path::new("blockhouse"))?);
        system::disk("ublkb0")?;
        Ok(server)
    };
    let server = through(server, upgrades, upgrade)?;
    println!("  {format}: fio found what it wrote, through {upgrades} upgrades: {gaps:?} ms");
    server.kill()?;
    serve(image, format)
}

/// Runs fio in a file system on the device, while its server is changed this many times. The file
/// system is intact, and all data is there.
fn through(
    mut server: Server,
    changes: u64,
    mut change: impl FnMut(Server) -> Result<Server>,
) -> Result<Server> {
    let device = Path::new(DEVICE);
    FileSystem::Ext4.make(device)?;
    let mount = Mount::at(FileSystem::Ext4, device, Path::new(PLACE))?;
    let file = mount.place().join("fio");
    let before = system::writes(device)?;
    let mut fio = Fio::start(&file, Work::WriteAndVerify)?;
    for number in 1..=changes {
        // Spread over fio's writes.
        let due = before + number * fio::WRITES / (changes + 1);
        while system::writes(device)? < due {
            ensure!(!fio.has_ended()?, "fio has ended before change {number}");
            std::thread::sleep(POLL_INTERVAL);
        }
        server = change(server)?;
    }
    // fio has compared everything after the last change.
    fio.finish()?;
    mount.unmount()?;
    tool("e2fsck", &["-f", "-n", DEVICE])?;
    Ok(server)
}

/// No other server can take the device, neither while it is served nor while it waits for a server.
fn strangers(folder: &Path, image: &Path, format: &str) -> Result<()> {
    let other = folder.join("other");
    File::create(&other)?.set_len(SIZE)?;
    let line = refused(command(&other, "raw"), &["--ublk", "0"])?;
    println!("  {format}: another image: {line}");
    ensure!(line.contains("another image"), "{line}");
    let line = refused(command(image, format), &["--ublk", "0"])?;
    println!("  {format}: a second server: {line}");
    std::fs::remove_file(&other)?;
    Ok(())
}

/// Waits until ten looks in a row have found that the server used no processor time: its pending
/// writes are done then, and nothing wakes it.
fn sleeps(server: &Server) -> Result<()> {
    let (mut before, mut looks) = (None, 0);
    system::wait_for("sleep of an idle server", || {
        std::thread::sleep(LOOK);
        let now = server.processor_time().ok()?;
        looks = if before.replace(now) == Some(now) { looks + 1 } else { 0 };
        (looks == 10).then_some(())
    })
}
