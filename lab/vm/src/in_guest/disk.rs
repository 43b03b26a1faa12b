//! The kinds of disk whose requests are counted; the host attaches them, or a kernel module makes
//! them.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::system;

/// A kind of disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// QEMU's NVMe disk.
    Nvme,
    /// QEMU's SCSI disk with FUA.
    Scsi,
    /// QEMU's virtio-blk, with a write cache and no FUA.
    Virtio,
    /// The kernel's SCSI disk in memory.
    ScsiDebug,
    /// The kernel's disk in memory with a write cache and FUA.
    NullBlkFua,
    /// The same without FUA, which takes its time for each request, as disks do.
    NullBlk,
}

impl Kind {
    /// The name on command lines and in reports, and its serial number if the host attaches it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nvme => "nvme",
            Self::Scsi => "scsi",
            Self::Virtio => "virtio",
            Self::ScsiDebug => "scsi-debug",
            Self::NullBlkFua => "null-blk-fua",
            Self::NullBlk => "null-blk",
        }
    }

    /// Makes the disk if the host did not attach it, and waits for it.
    pub fn find(self) -> Result<PathBuf> {
        system::load_nvme()?;
        system::load_all(&["virtio_pci", "virtio_blk", "virtio_scsi", "sd_mod"])?;
        match self {
            Self::Nvme | Self::Virtio => system::disk_of(self.name()),
            Self::Scsi => system::scsi_disk("QEMU"),
            Self::ScsiDebug => {
                system::load("scsi_debug", "dev_size_mb=320 delay=0 lbpu=1")?;
                system::scsi_disk("Linux")
            }
            Self::NullBlkFua => null_blk("nullb0", &[("fua", "1")]),
            Self::NullBlk => null_blk("nullb1", &SLOW),
        }
    }
}

/// No FUA, and a timer that ends each request after this many nanoseconds.
const SLOW: [(&str, &str); 3] = [("fua", "0"), ("irqmode", "2"), ("completion_nsec", "2000000")];

/// A disk in memory with a write cache of its own.
fn null_blk(name: &str, more: &[(&str, &str)]) -> Result<PathBuf> {
    system::load("null_blk", "nr_devices=0")?;
    let config = Path::new("/sys/kernel/config");
    if !config.join("nullb").exists() {
        system::tool("mount", &["-t", "configfs", "config", "/sys/kernel/config"])?;
    }
    let folder = config.join("nullb").join(name);
    std::fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let settings = [("size", "320"), ("memory_backed", "1"), ("cache_size", "64")];
    for (setting, value) in settings.iter().chain(more).chain(&[("power", "1")]) {
        system::write(folder.join(setting), value)?;
    }
    system::disk(name)
}
