//! A raw volume and its side file.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use crate::folders::Folders;
use crate::template::quiet;

/// A kind of volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A raw file.
    File,
    /// A loop device.
    Device,
}

/// All kinds of volume.
pub const KINDS: [Kind; 2] = [Kind::File, Kind::Device];

impl Kind {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::File => "a raw file",
            Self::Device => "a loop device",
        }
    }
}

/// A volume; its device is detached when it is dropped.
pub struct Volume {
    pub kind: Kind,
    /// As commands name it.
    pub path: PathBuf,
    /// The side file.
    bitmaps: PathBuf,
}

impl Volume {
    /// A new volume of zeros, without bitmaps. A device needs root.
    pub fn new(folders: &Folders, kind: Kind, size: u64) -> Result<Self> {
        let file = folders.images().join("volume");
        std::fs::File::create(&file)?.set_len(size)?;
        let bitmaps = folders.images().join("side");
        let path = match kind {
            Kind::File => file,
            Kind::Device => {
                let words = ["--find", "--show", "volume"];
                quiet(folders.images(), "losetup", &words)?.trim().into()
            }
        };
        Ok(Self { kind, path, bitmaps })
    }

    /// The options of its bitmaps.
    pub fn options(&self) -> [String; 2] {
        ["--bitmaps".into(), self.bitmaps.display().to_string()]
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        if self.kind == Kind::Device {
            // If this fails, the device stays until the machine is shut down.
            let _ = Command::new("losetup").arg("--detach").arg(&self.path).status();
        }
    }
}
