//! Where an image is: on tmpfs, on a loop device over tmpfs, or in a file on disk.
//!
//! An image is written whole before anything is measured, so that it has no holes. Dropping a
//! storage removes its device and its file.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use rustix::fs::{Advice, fadvise, statvfs};
use tempfile::TempDir;

use super::caching::Caching;
use super::interrupt::Interrupt;
use lab_nbd::pattern;
use lab_tools::apt::is_root;
use lab_tools::process::{run, stdout_of};

const MEMORY: &str = "/dev/shm";
const CHUNK: usize = 1 << 20;

/// A kind of place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// A file in /dev/shm
    Tmpfs,
    /// A loop device with direct I/O over a file in /dev/shm (needs root)
    Loop,
    /// A file in --dir; reports name the file system that is found there
    #[value(alias = "disk")]
    Ext4,
}

/// An image in its place.
pub struct Storage {
    path: PathBuf,
    size: u64,
    description: String,
    kind: Kind,
    // Dropped in this order: a device is detached before its file is removed.
    _device: Option<LoopDevice>,
    _folder: TempDir,
}

impl Storage {
    /// Makes an image of `size` bytes, a multiple of 1 MiB, and fills it.
    pub fn create(kind: Kind, size: u64, disk: &Path, interrupt: &Interrupt) -> Result<Self> {
        Self::with(kind, size, disk, |file| fill(file, size, interrupt))
    }

    /// Makes a file or device of `size` bytes, a multiple of 1 MiB, that consists of holes.
    pub fn bare(kind: Kind, size: u64, disk: &Path) -> Result<Self> {
        Self::with(kind, size, disk, |file| holes(file, size))
    }

    fn with(
        kind: Kind,
        size: u64,
        disk: &Path,
        make: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<Self> {
        let parent = match kind {
            Kind::Tmpfs | Kind::Loop => Path::new(MEMORY),
            Kind::Ext4 => disk,
        };
        check_room(kind, size, room(kind, parent)?, parent)?;
        let folder = tempfile::Builder::new()
            .prefix("blockhouse-compare-")
            .tempdir_in(parent)
            .with_context(|| format!("cannot make a folder in {}", parent.display()))?;
        let file = folder.path().join("image.raw");
        make(&file)?;
        let device = match kind {
            Kind::Loop => Some(LoopDevice::attach(&file)?),
            Kind::Tmpfs | Kind::Ext4 => None,
        };
        let system = file_system(&file)?;
        let description = match kind {
            Kind::Loop => format!("loop device with direct I/O over a file on {system}"),
            Kind::Tmpfs | Kind::Ext4 => format!("file on {system}"),
        };
        let path = device.as_ref().map_or(file, |device| device.path.clone());
        Ok(Self { path, size, description, kind, _device: device, _folder: folder })
    }

    /// Makes all of it holes again.
    pub fn clear(&self) -> Result<()> {
        if !self.is_device() {
            return holes(&self.path, self.size);
        }
        // Without --force, blkdiscard warns each time that the device holds an image.
        let mut blkdiscard = Command::new("blkdiscard");
        blkdiscard.arg("--force").arg(&self.path).stderr(Stdio::null());
        run(blkdiscard)
    }

    /// Why this kind of place is not available on this machine; `None` if it is.
    pub fn unavailable(kind: Kind) -> Option<&'static str> {
        match kind {
            Kind::Tmpfs | Kind::Loop if !Path::new(MEMORY).is_dir() => Some("there is no /dev/shm"),
            Kind::Loop if !is_root() => Some("loop devices need root"),
            Kind::Loop if !Path::new("/dev/loop-control").exists() => {
                Some("the kernel has no loop devices")
            }
            _ => None,
        }
    }

    /// The file or device that holds the image.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes in the image.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The description, for reports.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// Whether [`Self::path`] is a block device.
    pub fn is_device(&self) -> bool {
        self.kind == Kind::Loop
    }

    /// Whether servers with these ways of caching do the same work here: on tmpfs all of them
    /// access memory.
    pub fn comparable(&self, one: Caching, other: Caching) -> bool {
        let any = self.kind == Kind::Tmpfs && one != Caching::Null && other != Caching::Null;
        any || one == other
    }

    /// Brings the image into the state in which a server of this way of caching finds it: nothing
    /// dirty, and the page cache empty or full.
    pub fn prepare_cache(&self, caching: Caching) -> Result<()> {
        if self.kind == Kind::Tmpfs {
            return Ok(());
        }
        let context = || format!("cannot prepare the cache of {}", self.path.display());
        let mut file = File::open(&self.path).with_context(context)?;
        file.sync_all().with_context(context)?;
        match caching {
            Caching::Direct => fadvise(&file, 0, None, Advice::DontNeed).with_context(context)?,
            Caching::Cached => {
                let mut buffer = vec![0; CHUNK];
                while file.read(&mut buffer).with_context(context)? > 0 {}
            }
            Caching::Null => {}
        }
        Ok(())
    }
}

/// Bytes that an image in `parent` may use. An image in memory may use half of the available
/// memory: the size of a tmpfs may exceed it, and other programs need memory, too.
fn room(kind: Kind, parent: &Path) -> Result<u64> {
    let system = statvfs(parent).with_context(|| format!("cannot look at {}", parent.display()))?;
    let free = system.f_bavail.saturating_mul(system.f_frsize);
    if kind == Kind::Ext4 {
        return Ok(free);
    }
    let meminfo = std::fs::read_to_string("/proc/meminfo").context("cannot read meminfo")?;
    Ok(free.min(available_memory(&meminfo).context("meminfo has no MemAvailable")? / 2))
}

fn available_memory(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kibibytes * 1024)
}

fn check_room(kind: Kind, size: u64, room: u64, parent: &Path) -> Result<()> {
    ensure!(size > 0 && size.is_multiple_of(CHUNK as u64), "the image's size must be whole MiB");
    ensure!(
        size <= room,
        "{} has room for {} MiB ({kind:?}), not for an image of {} MiB: choose a smaller --size",
        parent.display(),
        room >> 20,
        size >> 20,
    );
    Ok(())
}

fn holes(path: &Path, size: u64) -> Result<()> {
    let made = File::create(path).and_then(|file| file.set_len(size));
    made.with_context(|| format!("cannot make {} of {} MiB", path.display(), size >> 20))
}

fn fill(path: &Path, size: u64, interrupt: &Interrupt) -> Result<()> {
    let context = || format!("cannot write {} MiB to {}", size >> 20, path.display());
    let mut file =
        OpenOptions::new().write(true).create_new(true).open(path).with_context(context)?;
    let mut chunk = vec![0; CHUNK];
    pattern::fill(&mut chunk, 0, 0);
    for offset in (0..size).step_by(CHUNK) {
        interrupt.check()?;
        pattern::move_to(&mut chunk, offset);
        file.write_all(&chunk).with_context(context)?;
    }
    file.sync_all().with_context(context)
}

/// The type of the file system that `path` is on: that of the longest mount point above it.
fn file_system(path: &Path) -> Result<String> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").context("cannot read the mounts")?;
    let path = path.canonicalize()?;
    let mut best: Option<(usize, &str)> = None;
    for mount in mounts.lines() {
        let mut fields = mount.split(' ').skip(1);
        let (Some(point), Some(kind)) = (fields.next(), fields.next()) else { continue };
        // Of equal mount points, the later one hides the earlier.
        if path.starts_with(point) && best.is_none_or(|(length, _)| point.len() >= length) {
            best = Some((point.len(), kind));
        }
    }
    Ok(best.with_context(|| format!("no mount holds {}", path.display()))?.1.to_owned())
}

/// A loop device, detached when dropped.
struct LoopDevice {
    path: PathBuf,
    // Kept open, because the kernel drops a device's page cache when its last user closes it.
    open: Option<File>,
}

impl LoopDevice {
    fn attach(file: &Path) -> Result<Self> {
        let mut losetup = Command::new("losetup");
        losetup.args(["--find", "--show", "--direct-io=on"]).arg(file);
        let path = PathBuf::from(stdout_of(losetup)?.trim_end());
        let mut device = Self { path, open: None };
        let name = device.path.file_name().context("losetup named no device")?;
        let direct = Path::new("/sys/block").join(name).join("loop/dio");
        if std::fs::read_to_string(&direct).unwrap_or_default().trim() != "1" {
            bail!("{} does no direct I/O over {}", device.path.display(), file.display());
        }
        let open = File::open(&device.path);
        device.open = Some(open.with_context(|| format!("cannot open {}", device.path.display()))?);
        Ok(device)
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        self.open = None;
        let mut losetup = Command::new("losetup");
        losetup.arg("--detach").arg(&self.path);
        if let Err(error) = run(losetup) {
            eprintln!("compare: {error:#}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_that_does_not_fit_is_never_begun() {
        let folder = Path::new("/somewhere");
        assert!(check_room(Kind::Tmpfs, 2 << 20, 2 << 20, folder).is_ok());
        let error = check_room(Kind::Tmpfs, 3 << 20, 2 << 20, folder).unwrap_err().to_string();
        assert!(error.contains("/somewhere has room for 2 MiB"), "{error}");
        assert!(check_room(Kind::Tmpfs, 4097, 2 << 20, folder).is_err());
        assert!(check_room(Kind::Tmpfs, 0, 2 << 20, folder).is_err());
    }

    #[test]
    fn memory_is_read_in_bytes() {
        let meminfo = "MemTotal:       100 kB\nMemAvailable:     50 kB\n";
        assert_eq!(available_memory(meminfo), Some(50 * 1024));
        assert_eq!(available_memory("MemTotal: 1 kB\n"), None);
    }

    #[test]
    fn what_is_kept_in_memory_never_takes_more_than_half_of_it() {
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
        let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
        let total: u64 = total.trim().strip_suffix(" kB").unwrap().parse().unwrap();
        assert!(room(Kind::Tmpfs, Path::new(MEMORY)).unwrap() <= total * 1024 / 2);
    }
}
