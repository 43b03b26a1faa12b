//! A guest that uses our disk as any Linux does: file system, freeze, trim, check, and work that
//! continues while the disk's server is killed and upgraded.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::OFlags;

use super::fio::{self, Fio, Work};
use super::system::{self, FileSystem, Mount, tool};
use lab_nbd::pattern;

/// Bytes in a large file.
pub const LARGE: u64 = 24 << 20;
/// How many small files are written beside fio's work.
const SMALL_FILES: u64 = 24;
const SMALL: u64 = 256 << 10;
const CHUNK: u64 = 64 << 10;
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Printed when the file system is frozen; the host waits for it.
pub const FROZEN: &str = "frozen";
/// The host's answer to [`FROZEN`].
pub const COPIED: &str = "copied";
/// Printed when a large file is written.
pub const WRITTEN: &str = "large file written";
/// Printed when the large file is removed and its space trimmed.
pub const TRIMMED: &str = "trimmed";
/// Printed when the work has ended during which the server is killed and upgraded.
pub const WORKED: &str = "worked";

/// Printed when the host is to kill or upgrade the server for the `number`th time.
pub fn progress(number: u64) -> String {
    format!("ready for change {number} of the server")
}

/// The first boot: makes a file system on the disk and uses it, then one on a disk whose server is
/// killed or upgraded this many times meanwhile.
pub fn first(disk: &str, killed: &str, changes: u64, file_system: FileSystem) -> Result<()> {
    let disk = prepare(disk)?;
    file_system.make(&disk)?;
    let mount = Mount::new(file_system, &disk)?;
    let place = mount.place().to_owned();
    for name in ["kept", "large"] {
        write_file(&place.join(name), LARGE, 1)?.sync_all()?;
    }
    freeze(&place)?;
    verify_file(&place.join("large"), LARGE, 1)?;
    print_line(WRITTEN)?;
    let free = free_space(&place)?;
    std::fs::remove_file(place.join("large"))?;
    wait_for_space(&place, free + LARGE * 9 / 10)?;
    rustix::fs::sync();
    // XFS frees space in the background, and a trim skips what is not freed yet.
    for _ in 0..2 {
        tool("fstrim", &["/mnt"])?;
        rustix::fs::sync();
        std::thread::sleep(Duration::from_secs(1));
    }
    print_line(TRIMMED)?;
    verify_file(&place.join("kept"), LARGE, 1)?;
    mount.unmount()?;
    check(&disk, file_system)?;

    let disk = system::disk_of(killed)?;
    file_system.make(&disk)?;
    let mount = Mount::new(file_system, &disk)?;
    work(mount.place(), &disk, changes)?;
    verify_small(mount.place())?;
    mount.unmount()?;
    check(&disk, file_system)
}

/// Free bytes of the file system.
fn free_space(place: &Path) -> Result<u64> {
    let found = rustix::fs::statvfs(place).context("cannot ask for free space")?;
    Ok(found.f_bfree * found.f_frsize)
}

/// Waits until this many bytes are free: XFS frees the space of a removed file some time later.
fn wait_for_space(place: &Path, wanted: u64) -> Result<()> {
    for _ in 0..1000 {
        if free_space(place)? >= wanted {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    bail!("the space of a removed file does not come free")
}

/// Freezes the file system, with data that no sync has made durable, until the host has a copy of
/// the disk.
fn freeze(place: &Path) -> Result<()> {
    write_file(&place.join("late"), SMALL, 2)?;
    tool("fsfreeze", &["--freeze", "/mnt"])?;
    print_line(FROZEN)?;
    let reply = read_line();
    tool("fsfreeze", &["--unfreeze", "/mnt"])?;
    let reply = reply?;
    ensure!(reply == COPIED, "the host said '{reply}'");
    Ok(())
}

/// Runs fio with many writes in flight, and makes small files durable one after the other. The
/// server's changes are spread over fio's writes, not over its reads.
fn work(place: &Path, disk: &Path, changes: u64) -> Result<()> {
    let before = system::writes(disk)?;
    let mut fio = Fio::start(&place.join("fio"), Work::WriteAndVerify)?;
    let mut left = (1..=changes).peekable();
    let mut small = 0..SMALL_FILES;
    while !fio.has_ended()? {
        match small.next() {
            Some(number) => {
                write_file(&place.join(format!("small{number}")), SMALL, number)?.sync_all()?;
            }
            None => std::thread::sleep(POLL_INTERVAL),
        }
        let done = system::writes(disk)? - before;
        let is_due = |number: &u64| done >= number * fio::WRITES / (changes + 2);
        while let Some(number) = left.next_if(is_due) {
            print_line(&progress(number))?;
        }
    }
    ensure!(small.is_empty(), "fio ended before the small files were written");
    print_line(WORKED)
}

/// The second boot: everything must be there, also on `frozen`, which the host copied while the
/// file system was frozen.
pub fn again(disk: &str, killed: &str, frozen: &str, file_system: FileSystem) -> Result<()> {
    let disk = prepare(disk)?;
    check(&disk, file_system)?;
    let mount = Mount::new(file_system, &disk)?;
    verify_file(&mount.place().join("kept"), LARGE, 1)?;
    mount.unmount()?;
    let disk = system::disk_of(killed)?;
    check(&disk, file_system)?;
    let mount = Mount::new(file_system, &disk)?;
    verify_small(mount.place())?;
    Fio::start(&mount.place().join("fio"), Work::Verify)?.finish()?;
    mount.unmount()?;
    let frozen = system::disk_of(frozen)?;
    // The log of a frozen XFS is not empty, on purpose: recovery removes open files without a name.
    if file_system == FileSystem::Ext4 {
        check(&frozen, file_system)?;
    }
    let mount = Mount::new(file_system, &frozen)?;
    for (name, size, generation) in [("kept", LARGE, 1), ("large", LARGE, 1), ("late", SMALL, 2)] {
        verify_file(&mount.place().join(name), size, generation)?;
    }
    mount.unmount()?;
    check(&frozen, file_system)
}

/// Loads the modules that the disk needs, and waits for the disk.
pub fn prepare(disk: &str) -> Result<std::path::PathBuf> {
    let modules = ["virtio_pci", "virtio_blk", "crc32c_generic", "ext4", "xfs"];
    modules.iter().try_for_each(|module| system::load(module, ""))?;
    system::disk_of(disk)
}

fn check(disk: &Path, file_system: FileSystem) -> Result<()> {
    let disk = disk.to_str().context("a disk without a name")?;
    match file_system {
        FileSystem::Ext4 => tool("e2fsck", &["-f", "-n", disk]),
        FileSystem::Xfs => tool("xfs_repair", &["-n", disk]),
    }
    .map(drop)
}

/// Prints a line to the console, which the host reads line by line.
pub fn print_line(line: &str) -> Result<()> {
    println!("{line}");
    std::io::stdout().flush().context("the host does not listen")
}

/// Waits for a line from the host.
fn read_line() -> Result<String> {
    let port = File::open("/dev/ttyS1").context("cannot listen to the host")?;
    let mut line = String::new();
    BufReader::new(port).read_line(&mut line).context("the host says nothing")?;
    Ok(line.trim_end().to_owned())
}

/// Writes a file with unique content, without making it durable.
fn write_file(path: &Path, size: u64, generation: u64) -> Result<File> {
    let file = File::create(path).with_context(|| format!("cannot make {}", path.display()))?;
    let mut chunk = vec![0; CHUNK as usize];
    for offset in (0..size).step_by(CHUNK as usize) {
        pattern::fill(&mut chunk, offset, generation);
        file.write_all_at(&chunk, offset).context("cannot write")?;
    }
    Ok(file)
}

/// Reads the file with direct I/O and checks its content.
fn verify_file(path: &Path, size: u64, generation: u64) -> Result<()> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(OFlags::DIRECT.bits() as i32);
    let file = options.open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let page = 4096;
    let mut space = vec![0; CHUNK as usize + page];
    let start = space.as_ptr().align_offset(page);
    let chunk = &mut space[start..start + CHUNK as usize];
    for offset in (0..size).step_by(CHUNK as usize) {
        file.read_exact_at(chunk, offset).context("cannot read")?;
        if let Err(what) = pattern::verify(chunk, offset, Some(generation)) {
            bail!("{}: {what}", path.display());
        }
    }
    Ok(())
}

fn verify_small(place: &Path) -> Result<()> {
    (0..SMALL_FILES)
        .try_for_each(|number| verify_file(&place.join(format!("small{number}")), SMALL, number))
}
