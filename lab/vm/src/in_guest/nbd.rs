//! The kernel's own NBD client on our server: a file system on the client's device, and the
//! requests that its durable writes cause to the disk below the server.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::direct::{self, BLOCK, Caching, WRITES, WriteMethod};
use super::images::State;
use super::serve::serve;
use super::system::{self, FileSystem, Mount, tool};
use super::trace::{self, Counts};
use crate::server::Server;

const DEVICE: &str = "nbd0";
const PLACE: &str = "/nbd";
/// Bytes in the export, enough for a file system.
const SIZE: u64 = 64 << 20;
/// Bytes that are counted.
const BYTES: u64 = WRITES * BLOCK as u64;

/// Lets the kernel use an image on the disk whose serial number is `serial`.
pub fn run(serial: &str) -> Result<()> {
    system::load_nvme()?;
    system::load_all(&["crc32c_generic", "ext4", "nbd"])?;
    let (disk, mount) = Mount::new_ext4(serial)?;
    trace::prepare()?;
    let image = mount.place().join("image");
    let (to, count) = (format!("of={}", image.display()), format!("count={}", SIZE >> 20));
    tool("dd", &["if=/dev/zero", &to, "bs=1M", &count])?;
    let server = serve(&image, &["--format", "raw"])?;
    let device = attach(&server)?;
    let outcome = use_device(&device, &disk);
    tool("nbd-client", &["-d", &device.display().to_string()])?;
    outcome?;
    server.stop()?;
    mount.unmount()
}

fn attach(server: &Server) -> Result<std::path::PathBuf> {
    let device = system::disk(DEVICE)?;
    let socket = server.socket().to_str().context("a socket without a name")?;
    let node = device.to_str().context("a device without a name")?;
    tool("nbd-client", &["-unix", socket, node, "-C", "2"])?;
    let size = format!("/sys/block/{DEVICE}/size");
    let expected = (SIZE / 512).to_string();
    system::wait_for("the size of the NBD device", || {
        system::read(Path::new(&size)).is_ok_and(|size| size == expected).then_some(())
    })?;
    ensure!(system::has_fua(&device)?, "the kernel does not see that the export takes FUA");
    Ok(device)
}

fn use_device(device: &Path, disk: &Path) -> Result<()> {
    // On the device itself: FUA writes of the kernel's client reach the disk as FUA writes.
    let counts =
        trace::count_synced(disk, || direct::run(device, WriteMethod::Each, Caching::Direct))?;
    expect("FUA on the device", counts, counts.fua >= WRITES as u32)?;
    // In a file system on it.
    FileSystem::Ext4.make(device)?;
    let mount = Mount::at(FileSystem::Ext4, device, Path::new(PLACE))?;
    let file = State::RawWritten.make(mount.place(), "inner")?;
    let counts =
        trace::count_synced(disk, || direct::run(&file, WriteMethod::Each, Caching::Direct))?;
    let only_fua = Counts { fua: WRITES as u32, bytes: BYTES, ..Counts::default() };
    expect("FUA in a file", counts, counts == only_fua)?;
    let counts =
        trace::count_synced(disk, || direct::run(&file, WriteMethod::FlushOnce, Caching::Direct))?;
    let plain = WRITES as u32;
    let one_flush = Counts { plain, flushes: 1, bytes: BYTES, ..Counts::default() };
    expect("writes, one flush in a file", counts, counts == one_flush)?;
    tool("fstrim", &[PLACE])?;
    mount.unmount()?;
    tool("e2fsck", &["-f", "-n", &device.display().to_string()]).map(drop)
}

fn expect(what: &str, counts: Counts, good: bool) -> Result<()> {
    println!("  {what:40} {counts}");
    ensure!(good, "{what}: the disk below the server got {counts}");
    Ok(())
}
