//! ublk devices with users who misuse them, and with processes that die at the wrong moment.
//!
//! Evidence: each refusal is one line that says what to do, and doing that helps. Nothing hangs,
//! every device that is left can be removed, no device in use is removed, and an image is unlocked
//! when its device is gone.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockhouse_engine::{UblkCommand, UblkControl, UblkInfo, ublk_flag, ublk_state};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use super::system::{self, FileSystem, Mount, tool};
use super::ublk_size;
use super::ublk_user::{
    DEVICE, SIZE, attach, bad, blockhouse, devices, good, image, info, kill_server, spawn,
};
use crate::server::Server;

const PLACE: &str = "/ublk";
/// How often a server is killed while it takes a device over, and an `attach` while it starts one.
const KILLS: u64 = 8;
/// The difference between the moments of two kills.
const STEP: Duration = Duration::from_millis(100);

/// One part of the test.
type Part = fn() -> Result<()>;

/// Runs all parts, one after the other; none leaves a device.
pub fn run() -> Result<()> {
    system::load_all(&["crc32c_generic", "ext4", "ublk_drv", "loop"])?;
    std::fs::create_dir_all("/run")?;
    let parts: [(&str, Part); 11] = [
        ("numbers", numbers),
        ("attached twice", twice),
        ("mounted", mounted),
        ("a server with more exports", more_exports),
        ("removed by another program", removed),
        ("no server", no_server),
        ("never started", never_started),
        ("killed while it takes over", killed_recovery),
        ("killed attach", killed_attach),
        ("load", load),
        ("full host", full_host),
    ];
    for (name, part) in parts {
        part().with_context(|| name.to_owned())?;
        let left = devices()?;
        ensure!(left.is_empty(), "{name}: left are {left:?}");
        println!("  {name}: ok");
    }
    ublk_size::run()
}

fn numbers() -> Result<()> {
    let image = image("a.img")?;
    bad(&["detach", DEVICE], "there is no ublk device 0")?;
    bad(&["detach", "/dev/ublkb4294967295"], "there is no ublk device")?;
    for number in ["1048576", "4294967295", "-1"] {
        let said = blockhouse(&["attach", &image, &format!("--id={number}")])?;
        ensure!(!said.is_good && said.error.contains("--id"), "{number}: {}", said.error);
    }
    // The highest device number.
    ensure!(good(&["attach", &image, "--id", "1048575"])? == "/dev/ublkb1048575", "another one");
    good(&["detach", "/dev/ublkb1048575"]).map(drop)
}

fn twice() -> Result<()> {
    let (first, second) = (image("a.img")?, image("b.img")?);
    let device = attach(&first)?;
    bad(&["attach", &first], "locked")?;
    bad(&["attach", &second, "--id", "0"], "is of another image; use another number")?;
    ensure!(good(&["attach", &second, "--id", "1"])? == "/dev/ublkb1", "another one");
    good(&["detach", "/dev/ublkb1"])?;
    good(&["detach", &device])?;
    bad(&["detach", &device], "there is no ublk device 0")
}

/// A mounted device cannot be removed; after its removal the image is intact and not open.
fn mounted() -> Result<()> {
    let image = image("m.qcow2")?;
    let device = attach(&image)?;
    let node = Path::new(&device);
    FileSystem::Ext4.make(node)?;
    let mount = Mount::at(FileSystem::Ext4, node, Path::new(PLACE))?;
    let file = mount.place().join("file");
    std::fs::write(&file, "text")?;
    bad(&["detach", &device], "unmount it first")?;
    mount.unmount()?;
    good(&["detach", &device])?;
    good(&["check", &image])?;
    let device = attach(&image)?;
    let mount = Mount::at(FileSystem::Ext4, Path::new(&device), Path::new(PLACE))?;
    ensure!(std::fs::read(&file)? == b"text", "the file is another");
    mount.unmount()?;
    good(&["detach", &device]).map(drop)
}

fn more_exports() -> Result<()> {
    let image = image("a.img")?;
    let mut command = Command::new("blockhouse");
    command.args(["serve", &image, "--nbd", "nbd+unix:///?socket=/tmp/more.sock"]);
    let _server = Server::start_ublk(command, Path::new(DEVICE))?;
    bad(&["detach", DEVICE], "is not all that process")?;
    ensure!(info(0)?.is_some_and(|info| info.state == ublk_state::LIVE), "it is gone");
    good(&["detach", DEVICE, "--force"]).map(drop)
}

/// When another program removes the device, its server has nothing to serve: it ends and releases
/// the image.
fn removed() -> Result<()> {
    let image = image("a.img")?;
    attach(&image)?;
    let mut control = UblkControl::open()?;
    control.command(UblkCommand::Stop, 0, 0, &mut [])?;
    control.command(UblkCommand::DeleteAsync, 0, 0, &mut [])?;
    let again = || blockhouse(&["attach", &image]).ok().filter(|said| said.is_good);
    let device = system::wait_for("the end of a server without a device", again)?.output;
    good(&["detach", &device]).map(drop)
}

/// A device whose server was killed waits, continues with the next server, and can be removed while
/// it is mounted: then its users get errors, and nothing hangs.
fn no_server() -> Result<()> {
    let (image, other) = (image("a.img")?, image("b.img")?);
    let device = attach(&image)?;
    FileSystem::Ext4.make(Path::new(&device))?;
    let mount = Mount::at(FileSystem::Ext4, Path::new(&device), Path::new(PLACE))?;
    kill_server()?;
    bad(&["attach", &other, "--id", "0"], "blockhouse detach /dev/ublkb0")?;
    ensure!(good(&["attach", &image, "--id", "0"])? == device, "another device");
    let file = mount.place().join("file");
    std::fs::write(&file, "text")?;
    File::open(&file)?.sync_all()?;
    kill_server()?;
    good(&["detach", &device])?;
    let written = File::create(mount.place().join("lost")).and_then(|mut file| {
        file.write_all(&[1; 4096])?;
        file.sync_all()
    });
    ensure!(written.is_err(), "a device that is gone took a write");
    // The device number is free only after the unmount.
    bad(&["attach", &image, "--id", "0"], "something still has it open")?;
    mount.unmount()?;
    let device = good(&["attach", &image, "--id", "0"])?;
    good(&["detach", &device]).map(drop)
}

/// A server that died before it started its device leaves a device that `detach` removes. The
/// server's pid may belong to another process now.
fn never_started() -> Result<()> {
    let image = image("a.img")?;
    let mut control = UblkControl::open()?;
    let own = 0xb10c << 48 | 1;
    let flags =
        ublk_flag::CMD_IOCTL_ENCODE | ublk_flag::USER_RECOVERY | ublk_flag::USER_RECOVERY_REISSUE;
    let (queues, depth, max_io_bytes) = (1, 4, 64 << 10);
    // Process 1 is not a server.
    let (state, id, server) = (ublk_state::DEAD, 9, 1);
    let left = UblkInfo { queues, depth, state, max_io_bytes, id, server, flags, note: own };
    control.command(UblkCommand::Add, id, 0, &mut left.to_bytes())?;
    bad(&["attach", &image, "--id", "9"], "use another number")?;
    good(&["detach", "/dev/ublkb9"])?;
    // Devices of other programs are not removed.
    let foreign = UblkInfo { note: 1, ..left };
    control.command(UblkCommand::Add, id, 0, &mut foreign.to_bytes())?;
    bad(&["attach", &image, "--id", "9"], "another program")?;
    bad(&["detach", "/dev/ublkb9", "--force"], "another program")?;
    Ok(control.command(UblkCommand::DeleteAsync, id, 0, &mut [])?)
}

/// Servers are killed while they take a device over: as soon as they have opened its file, and at
/// other moments. The next server continues, or says why it cannot; in that case the device can be
/// removed.
fn killed_recovery() -> Result<()> {
    let image = image("a.img")?;
    let words = ["serve", &image, "--workers", "1", "--state", "off", "--ublk", "0"];
    attach_with(&words)?;
    kill_server()?;
    for number in 0..KILLS {
        let mut server = spawn(&words)?;
        match number % 2 {
            0 => wait_until_open(&mut server)?,
            _ => std::thread::sleep(STEP * number as u32),
        }
        server.kill()?;
        server.wait()?;
    }
    match attach_with(&words) {
        Ok(()) => println!("  taken over after {KILLS} kills"),
        // Linux before 6.16 cannot restart a recovery that was interrupted.
        Err(error) => {
            println!("  {error:#}");
            ensure!(
                info(0)?.is_some_and(|info| info.flags & ublk_flag::UPDATE_SIZE == 0),
                "{error:#}"
            );
        }
    }
    good(&["detach", DEVICE]).map(drop)
}

/// Starts a server in the background, and waits until it is ready.
fn attach_with(words: &[&str]) -> Result<()> {
    let words: Vec<_> = ["serve", "--fork"].iter().chain(&words[1..]).copied().collect();
    good(&words).map(drop)
}

/// Waits until a server has opened the device's file, or has ended.
fn wait_until_open(server: &mut Child) -> Result<()> {
    let files = format!("/proc/{}/fd", server.id());
    let is_it = |path: &Path| path == Path::new("/dev/ublkc0");
    system::wait_for("a server that takes the device over", || {
        if !matches!(server.try_wait(), Ok(None)) {
            return Some(());
        }
        let mut files = std::fs::read_dir(&files).ok()?.flatten();
        let mut targets = files.by_ref().filter_map(|file| std::fs::read_link(file.path()).ok());
        targets.any(|path| is_it(&path)).then_some(())
    })
}

/// `attach` is killed while the server starts: the server ends, too, or the device can be removed.
fn killed_attach() -> Result<()> {
    let image = image("a.img")?;
    for number in 0..KILLS {
        let mut command = spawn(&["attach", &image])?;
        std::thread::sleep(STEP * number as u32);
        command.kill()?;
        command.wait()?;
        let freed = system::wait_for("an image that nobody serves", || {
            let said = blockhouse(&["attach", &image]).ok()?;
            if !said.is_good && Path::new(DEVICE).exists() {
                // The device was ready before the kill, and can be detached.
                good(&["detach", DEVICE]).ok()?;
            }
            said.is_good.then_some(said.output)
        })?;
        good(&["detach", &freed])?;
    }
    Ok(())
}

/// A device is removed while other processes read it: they get errors, and end.
fn load() -> Result<()> {
    let device = attach(&image("a.img")?)?;
    let script = format!("while dd if={device} of=/dev/null bs=4k iflag=direct; do :; done");
    let reader = || {
        let mut command = Command::new("sh");
        command.args(["-c", &script]).stdout(Stdio::null()).stderr(Stdio::null()).spawn()
    };
    let readers: Vec<_> = (0..4).map(|_| reader()).collect::<Result<_, _>>()?;
    std::thread::sleep(STEP);
    good(&["detach", &device])?;
    for mut reader in readers {
        reader.wait()?;
    }
    Ok(())
}

/// A host without space: the write fails, and the device still works.
fn full_host() -> Result<()> {
    let place = Path::new("/full");
    std::fs::create_dir_all(place)?;
    mount("full", place, "tmpfs", MountFlags::empty(), Some(c"size=8M"))?;
    let path = place.join("disk.img");
    File::create(&path)?.set_len(SIZE)?;
    let device = attach(path.to_str().context("a path of text")?)?;
    let file = File::options().read(true).write(true).open(&device)?;
    let write = || file.write_all_at(&vec![0x55; 16 << 20], 0).and_then(|()| file.sync_all());
    let error = write().err().context("a full host took a write")?;
    println!("  a write on a full host: {error}");
    let mut bytes = [1; 4096];
    file.read_exact_at(&mut bytes, SIZE - 4096)?;
    ensure!(bytes == [0; 4096], "other bytes");
    drop(file);
    tool("blkdiscard", &[&device])?;
    let file = File::options().write(true).open(&device)?;
    file.write_all_at(&[0x66; 4096], 0)?;
    file.sync_all()?;
    drop(file);
    good(&["detach", &device])?;
    std::fs::remove_file(&path)?;
    Ok(unmount(place, UnmountFlags::empty())?)
}
