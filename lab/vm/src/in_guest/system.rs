//! The guest's kernel: modules, devices, file systems, settings.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

use crate::kernel::MODULES;
use lab_tools::process::line;

const TIMEOUT: Duration = Duration::from_secs(120);
const RETRY_DELAY: Duration = Duration::from_millis(5);

/// Loads a module with its options, after the modules that it depends on.
pub fn load(module: &str, options: &str) -> Result<()> {
    let folder = Path::new("/").join(MODULES);
    let order = read(&folder.join(format!("{module}.order")))?;
    for name in order.lines() {
        let file = File::open(folder.join(format!("{name}.ko")))
            .with_context(|| format!("no module {name}"))?;
        let options = if name == module.replace('-', "_") { options } else { "" };
        match rustix::system::finit_module(&file, &CString::new(options)?, 0) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error).with_context(|| format!("cannot load {name}")),
        }
    }
    Ok(())
}

/// Loads modules without options, in this order.
pub fn load_all(modules: &[&str]) -> Result<()> {
    modules.iter().try_for_each(|module| load(module, ""))
}

/// Loads the NVMe driver without multipath: with multipath, the requests go to another device than
/// the one that is traced.
pub fn load_nvme() -> Result<()> {
    load("nvme_core", "multipath=N")?;
    load("nvme", "")
}

/// The content of a file of /sys, /proc or the like, without leading and trailing white space.
pub fn read(file: &Path) -> Result<String> {
    let text = std::fs::read_to_string(file);
    Ok(text.with_context(|| format!("cannot read {}", file.display()))?.trim().to_owned())
}

/// Sets a file of /sys, /proc or the like.
pub fn write(file: impl AsRef<Path>, text: &str) -> Result<()> {
    let file = file.as_ref();
    std::fs::write(file, text)
        .with_context(|| format!("cannot write \"{text}\" to {}", file.display()))
}

/// Waits until `ready` returns a value, and returns it.
pub fn wait_for<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> Result<T> {
    let end = Instant::now() + TIMEOUT;
    loop {
        if let Some(found) = ready() {
            return Ok(found);
        }
        if Instant::now() >= end {
            bail!("{what} did not come within {} s", TIMEOUT.as_secs());
        }
        std::thread::sleep(RETRY_DELAY);
    }
}

/// Runs a tool and returns its output; the error has the output if the tool fails.
pub fn tool(program: &str, args: &[&str]) -> Result<String> {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null());
    let output = command.output().with_context(|| format!("cannot start {}", line(&command)))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if !output.status.success() {
        let (said, complaint) = (text(&output.stdout), text(&output.stderr));
        bail!("{} failed ({}): {said} {complaint}", line(&command), output.status);
    }
    Ok(text(&output.stdout))
}

/// Waits for a disk by the name that its driver gives it, as in `nvme0n1`.
pub fn disk(name: &str) -> Result<PathBuf> {
    let node = Path::new("/dev").join(name);
    wait_for(name, || node.exists().then(|| node.clone()))
}

/// Waits for an NVMe or virtio disk by the serial number that the host gave it: the driver's names
/// depend on the order in which disks appear.
pub fn disk_of(serial: &str) -> Result<PathBuf> {
    find_disk(serial, &["device/serial", "serial"])
}

/// Waits for a SCSI disk by its vendor.
pub fn scsi_disk(vendor: &str) -> Result<PathBuf> {
    find_disk(vendor, &["device/vendor"])
}

/// The disk that has this value in one of these attributes.
fn find_disk(value: &str, attributes: &[&str]) -> Result<PathBuf> {
    let find = || {
        let mut disks = std::fs::read_dir("/sys/block").ok()?.flatten();
        let found = disks.find(|disk| {
            let is_it = |name| read(&disk.path().join(name)).is_ok_and(|found| found == value);
            attributes.iter().any(is_it)
        })?;
        Some(Path::new("/dev").join(found.file_name())).filter(|node| node.exists())
    };
    wait_for(value, find)
}

/// Whether the disk `node` supports FUA, from its queue's attribute.
pub fn has_fua(node: &Path) -> Result<bool> {
    let name = node.file_name().and_then(|name| name.to_str()).context("a nameless disk")?;
    Ok(read(Path::new(&format!("/sys/block/{name}/queue/fua")))? == "1")
}

/// How many writes the disk `node` has completed.
pub fn writes(node: &Path) -> Result<u64> {
    let name = node.file_name().and_then(|name| name.to_str()).context("a nameless disk")?;
    let statistics = read(Path::new(&format!("/sys/block/{name}/stat")))?;
    // Documentation/block/stat.rst: four numbers on reads come first.
    let writes = statistics.split_whitespace().nth(4).and_then(|writes| writes.parse().ok());
    writes.with_context(|| format!("the kernel counts no writes: {statistics}"))
}

/// The file systems that images lie on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum FileSystem {
    /// ext4 with its defaults, but it commits its journal only every ten minutes.
    Ext4,
    /// XFS with its defaults.
    Xfs,
}

impl FileSystem {
    /// The kernel's name for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
        }
    }

    /// The mount options. By default ext4 commits its journal every five seconds, which would be
    /// counted on a slow machine.
    fn mount_options(self) -> Option<&'static CStr> {
        match self {
            Self::Ext4 => Some(c"commit=600"),
            Self::Xfs => None,
        }
    }

    /// Makes a file system on `disk`. Nothing is initialized lazily, because that would be counted.
    pub fn make(self, disk: &Path) -> Result<()> {
        let disk = disk.to_str().context("a disk without a name")?;
        let made = match self {
            Self::Ext4 => {
                let at_once = "lazy_itable_init=0,lazy_journal_init=0";
                // By default a small file system has blocks of 1 KiB, and a large one of 4 KiB.
                tool("mkfs.ext4", &["-q", "-F", "-b", "4096", "-E", at_once, disk])
            }
            Self::Xfs => tool("mkfs.xfs", &["-q", "-f", disk]),
        };
        made.map(drop)
    }
}

/// A mounted file system; unmounted when it is dropped.
pub struct Mount {
    place: PathBuf,
}

impl Mount {
    /// Mounts `disk` at /mnt.
    pub fn new(kind: FileSystem, disk: &Path) -> Result<Self> {
        Self::at(kind, disk, Path::new("/mnt"))
    }

    /// Mounts `disk` at `place`, a folder that is created if it is missing.
    pub fn at(kind: FileSystem, disk: &Path, place: &Path) -> Result<Self> {
        let place = place.to_owned();
        std::fs::create_dir_all(&place)
            .with_context(|| format!("cannot make {}", place.display()))?;
        let options = kind.mount_options();
        rustix::mount::mount(disk, &place, kind.name(), MountFlags::NOATIME, options)
            .with_context(|| format!("cannot mount {} on {}", kind.name(), disk.display()))?;
        Ok(Self { place })
    }

    /// Makes ext4 on the disk with this serial number, and mounts it at /mnt. From then on the
    /// kernel starts no periodic writeback. Returns the disk, too.
    pub fn new_ext4(serial: &str) -> Result<(PathBuf, Self)> {
        let disk = disk_of(serial)?;
        FileSystem::Ext4.make(&disk)?;
        let mount = Self::new(FileSystem::Ext4, &disk)?;
        stop_background_writes()?;
        Ok((disk, mount))
    }

    /// The mount point.
    pub fn place(&self) -> &Path {
        &self.place
    }

    /// Unmounts it; nothing may be open there.
    pub fn unmount(self) -> Result<()> {
        rustix::mount::unmount(&self.place, UnmountFlags::empty())
            .with_context(|| format!("cannot unmount {}", self.place.display()))?;
        std::mem::forget(self);
        Ok(())
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // Without an orderly unmount: this happens after another error.
        let _ = rustix::mount::unmount(&self.place, UnmountFlags::DETACH);
    }
}

/// Stops the kernel's periodic writeback, so that only requested writes are counted.
pub fn stop_background_writes() -> Result<()> {
    write("/proc/sys/vm/dirty_writeback_centisecs", "0")?;
    let xfs = Path::new("/proc/sys/fs/xfs/xfssyncd_centisecs");
    if xfs.exists() {
        write(xfs, "720000")?;
    }
    Ok(())
}
