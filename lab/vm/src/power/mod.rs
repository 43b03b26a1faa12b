//! Loss of power: checks acknowledged writes after a loss of power at the worst moments.
//!
//! The guest's server writes to a disk that logs everything ([`log`]); each acknowledgement leaves
//! a mark. Then the disk is rebuilt up to each mark without the writes that were not flushed, the
//! file system recovers, and the image must hold all acknowledged changes ([`history`]). A server
//! that ignores flushes must fail the same test.

pub mod history;
pub mod log;
pub mod mark_images;
pub mod on_host;
pub mod recovery;
pub mod scenario;

use history::Writes;

use super::in_guest::system::FileSystem;

/// How many acknowledgements are marked, and replayed to.
pub const MARKS: usize = 64;
/// The seed of the history; any other value is as good.
pub const SEED: u64 = 7;

/// The layer between the image and the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// A file of a file system.
    File(FileSystem),
    /// Nothing.
    Device,
}

/// A server on a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Configuration {
    /// The layer below the image.
    pub layer: Layer,
    /// The image's format.
    pub format: &'static str,
    /// The server's cache mode.
    pub cache: &'static str,
    /// The server's engine.
    pub engine: &'static str,
    /// Whether the disk that is logged takes FUA.
    pub fua: Fua,
    /// Where the image's bitmaps are.
    pub bitmaps: Bitmaps,
}

/// Whether the image has a bitmap that records changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bitmaps {
    /// There are no bitmaps.
    None,
    /// The bitmap is in a side file in the same file system.
    SideFile,
}

/// Whether a disk takes FUA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fua {
    Taken,
    Unknown,
}

/// Every layer, format, cache mode, engine and kind of disk, in the most usual combinations. The
/// last of these is the control; volumes with a side file follow.
pub const CONFIGURATIONS: &[Configuration] = &[
    on(EXT4, "raw", "none", "io_uring", Fua::Taken),
    on(EXT4, "raw", "none", "linux-aio", Fua::Unknown),
    on(EXT4, "raw", "directsync", "threads", Fua::Taken),
    on(EXT4, "raw", "writeback", "io_uring", Fua::Taken),
    on(EXT4, "raw", "writethrough", "threads", Fua::Unknown),
    on(XFS, "raw", "none", "io_uring", Fua::Taken),
    on(XFS, "qcow2", "none", "linux-aio", Fua::Taken),
    on(EXT4, "qcow2", "none", "io_uring", Fua::Taken),
    on(EXT4, "qcow2", "writeback", "threads", Fua::Unknown),
    on(Layer::Device, "qcow2", "none", "io_uring", Fua::Taken),
    on(Layer::Device, "raw", "none", "io_uring", Fua::Taken),
    on(Layer::Device, "raw", "none", "threads", Fua::Unknown),
    on(EXT4, "raw", "unsafe", "io_uring", Fua::Taken),
    volume(EXT4, "none", "io_uring", Fua::Taken),
    volume(XFS, "writeback", "linux-aio", Fua::Taken),
    volume(EXT4, "directsync", "threads", Fua::Unknown),
    volume(XFS, "none", "io_uring", Fua::Unknown),
    volume(EXT4, "unsafe", "io_uring", Fua::Taken),
];

const EXT4: Layer = Layer::File(FileSystem::Ext4);
const XFS: Layer = Layer::File(FileSystem::Xfs);

const fn on(
    layer: Layer,
    format: &'static str,
    cache: &'static str,
    engine: &'static str,
    fua: Fua,
) -> Configuration {
    Configuration { layer, format, cache, engine, fua, bitmaps: Bitmaps::None }
}

const fn volume(
    layer: Layer,
    cache: &'static str,
    engine: &'static str,
    fua: Fua,
) -> Configuration {
    Configuration { bitmaps: Bitmaps::SideFile, ..on(layer, "raw", cache, engine, fua) }
}

impl Configuration {
    /// The name in reports.
    pub fn name(self) -> String {
        let Self { format, cache, engine, .. } = self;
        let layer = match self.layer {
            Layer::File(file_system) => file_system.name(),
            Layer::Device => "device",
        };
        let fua = if self.fua == Fua::Taken { "FUA" } else { "no FUA" };
        let bitmaps = if self.bitmaps == Bitmaps::SideFile { "bitmaps of " } else { "" };
        format!("{bitmaps}{format} on {layer}, {fua}, {cache}, {engine}")
    }

    /// The indexes of the configurations with these bitmaps.
    pub fn with(bitmaps: Bitmaps) -> Vec<usize> {
        let is_with = |index: &usize| CONFIGURATIONS[*index].bitmaps == bitmaps;
        (0..CONFIGURATIONS.len()).filter(is_with).collect()
    }

    /// Whether the server ignores flushes, so that acknowledged writes must get lost.
    pub fn is_control(self) -> bool {
        self.cache == "unsafe"
    }

    /// What the server guarantees for a plain write.
    pub fn writes(self) -> Writes {
        match self.cache {
            "writethrough" | "directsync" => Writes::Durable,
            _ => Writes::Volatile,
        }
    }

    /// Bytes of the disk: the minimum of the file system, because there are many copies.
    pub fn disk_size(self) -> u64 {
        match self.layer {
            XFS => 320 << 20,
            EXT4 => 24 << 20,
            // The metadata needs space in addition to the disk's content.
            Layer::Device if self.format == "qcow2" => 2 * history::SIZE,
            Layer::Device => history::SIZE,
        }
    }
}

/// The name of the mark after a round.
pub fn mark(round: usize) -> String {
    format!("round{round}")
}

/// The round of a mark.
pub fn round_of(mark: &str) -> Option<usize> {
    mark.strip_prefix("round")?.parse().ok()
}
