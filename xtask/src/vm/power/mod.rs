//! Loss of power: what is left of acknowledged writes at the worst moment, over and over.
//!
//! The guest's server writes to a disk that logs everything ([`log`]); each acknowledgement leaves a
//! mark. Then the disk is built again up to each mark, with all that was not flushed dropped, the file
//! system recovers, and the image must hold what was acknowledged ([`history`]). A server that ignores
//! flushes goes through the same and must fail.

pub mod history;
pub mod log;
pub mod on_host;
pub mod recovery;

use clap::ValueEnum;

use super::inside::system::FileSystem;

/// How many acknowledgements are marked, and replayed to.
pub const MARKS: usize = 64;
/// Of the history; any other shows the same.
pub const SEED: u64 = 7;

/// What lies between the image and the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// A file of a file system.
    File(FileSystem),
    /// Nothing.
    Device,
}

/// A server on a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Configuration {
    /// A raw file on ext4, disk with FUA
    #[value(name = "raw-ext4")]
    RawExt4,
    /// A raw file on ext4, disk without FUA
    #[value(name = "raw-ext4-nofua")]
    RawExt4NoFua,
    /// A raw file on XFS, disk with FUA
    RawXfs,
    /// A qcow2 file on ext4, disk with FUA
    #[value(name = "qcow2-ext4")]
    Qcow2Ext4,
    /// The disk itself, with FUA
    Device,
    /// A raw file on ext4 whose server ignores flushes
    Control,
}

impl Configuration {
    /// As reports and command lines call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::RawExt4 => "raw-ext4",
            Self::RawExt4NoFua => "raw-ext4-nofua",
            Self::RawXfs => "raw-xfs",
            Self::Qcow2Ext4 => "qcow2-ext4",
            Self::Device => "device",
            Self::Control => "control",
        }
    }

    /// What the image lies on.
    pub fn layer(self) -> Layer {
        match self {
            Self::RawExt4 | Self::RawExt4NoFua | Self::Qcow2Ext4 | Self::Control => {
                Layer::File(FileSystem::Ext4)
            }
            Self::RawXfs => Layer::File(FileSystem::Xfs),
            Self::Device => Layer::Device,
        }
    }

    /// The image's format.
    pub fn format(self) -> &'static str {
        if self == Self::Qcow2Ext4 { "qcow2" } else { "raw" }
    }

    /// The server's cache mode.
    pub fn cache(self) -> &'static str {
        if self == Self::Control { "unsafe" } else { "none" }
    }

    /// Bytes of the disk: as few as the file system can do with, for there are many copies.
    pub fn disk_size(self) -> u64 {
        match self.layer() {
            Layer::File(FileSystem::Xfs) => 320 << 20,
            Layer::File(FileSystem::Ext4) => 24 << 20,
            Layer::Device => history::SIZE,
        }
    }

    /// Whether the disk that is logged takes FUA.
    pub fn has_fua(self) -> bool {
        self != Self::RawExt4NoFua
    }
}

/// The mark behind a round, by its number.
pub fn mark(round: usize) -> String {
    format!("round{round}")
}

/// The round of a mark.
pub fn round_of(mark: &str) -> Option<usize> {
    mark.strip_prefix("round")?.parse().ok()
}
