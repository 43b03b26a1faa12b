//! A guest that lives on a disk of ours, as any Linux would: file system, freeze, trim, check, and
//! work that goes on while the server behind the disk dies.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::fs::OFlags;

use super::system::{self, FileSystem, Mount, tool};
use crate::compare::pattern;

/// Bytes in a large file.
pub const LARGE: u64 = 24 << 20;
/// Steps of the work under which the server dies.
pub const STEPS: u64 = 24;
const SMALL: u64 = 256 << 10;
const CHUNK: u64 = 64 << 10;

/// What the host waits for.
pub const WRITTEN: &str = "large file written";
/// The large file is gone and its space given back.
pub const TRIMMED: &str = "trimmed";

/// A step of the work has ended.
pub fn step(number: u64) -> String {
    format!("step {number}")
}

/// The first life: makes a file system on the disk and uses it.
pub fn first(disk: &str, file_system: FileSystem) -> Result<()> {
    let disk = prepare(disk)?;
    file_system.make(&disk)?;
    let mount = Mount::new(file_system, &disk)?;
    let place = mount.place().to_owned();
    for name in ["kept", "large"] {
        write_file(&place.join(name), LARGE, 1)?;
    }
    tool("fsfreeze", &["--freeze", "/mnt"])?;
    tool("fsfreeze", &["--unfreeze", "/mnt"])?;
    verify_file(&place.join("large"), LARGE, 1)?;
    say(WRITTEN)?;
    std::fs::remove_file(place.join("large"))?;
    rustix::fs::sync();
    tool("fstrim", &["/mnt"])?;
    rustix::fs::sync();
    say(TRIMMED)?;
    for number in 0..STEPS {
        write_file(&place.join(format!("small{number}")), SMALL, number)?;
        say(&step(number))?;
    }
    verify_all(&place)?;
    mount.unmount()?;
    check(&disk, file_system)
}

/// The second life, after a reboot: everything is still there.
pub fn again(disk: &str, file_system: FileSystem) -> Result<()> {
    let disk = prepare(disk)?;
    check(&disk, file_system)?;
    let mount = Mount::new(file_system, &disk)?;
    verify_all(mount.place())?;
    mount.unmount()
}

/// Loads what the disk needs, and waits for it.
pub fn prepare(disk: &str) -> Result<std::path::PathBuf> {
    let modules = ["virtio_pci", "virtio_blk", "crc32c_generic", "ext4", "xfs"];
    modules.iter().try_for_each(|module| system::load(module, ""))?;
    // By serial number, or by name where the disk has none.
    if disk.starts_with("vd") { system::disk(disk) } else { system::disk_of(disk) }
}

fn check(disk: &Path, file_system: FileSystem) -> Result<()> {
    let disk = disk.to_str().context("a disk without a name")?;
    match file_system {
        FileSystem::Ext4 => tool("e2fsck", &["-f", "-n", disk]),
        FileSystem::Xfs => tool("xfs_repair", &["-n", disk]),
    }
    .map(drop)
}

/// Tells the host, who reads line by line.
pub fn say(line: &str) -> Result<()> {
    println!("{line}");
    std::io::stdout().flush().context("the host does not listen")
}

/// Writes a file that can be told from any other, and makes it durable.
fn write_file(path: &Path, size: u64, generation: u64) -> Result<()> {
    let file = File::create(path).with_context(|| format!("cannot make {}", path.display()))?;
    let mut chunk = vec![0; CHUNK as usize];
    for offset in (0..size).step_by(CHUNK as usize) {
        pattern::fill(&mut chunk, offset, generation);
        file.write_all_at(&chunk, offset).context("cannot write")?;
    }
    file.sync_all().with_context(|| format!("cannot flush {}", path.display()))
}

/// Reads it from the disk, past the page cache.
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

fn verify_all(place: &Path) -> Result<()> {
    verify_file(&place.join("kept"), LARGE, 1)?;
    (0..STEPS)
        .try_for_each(|number| verify_file(&place.join(format!("small{number}")), SMALL, number))
}
