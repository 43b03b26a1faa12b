//! Loss of power: what is left of acknowledged writes at the worst moment, over and over.
//!
//! The guest's server writes to a disk that logs everything ([`log`]); each acknowledgement leaves
//! a mark. Then the disk is built again up to each mark, with all that was not flushed dropped, the
//! file system recovers, and the image must hold what was acknowledged ([`history`]). A server that
//! ignores flushes goes through the same and must fail.

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
/// Of the history; any other shows the same.
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

/// Whether changes are recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bitmaps {
    /// There are no bitmaps.
    None,
    /// In a side file in the same file system.
    SideFile,
}

/// Whether a disk takes FUA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fua {
    Taken,
    Unknown,
}

/// Every layer, format, cache mode, engine and kind of disk, each in the company that is most
/// usual, the last of them being the control; then volumes with a side file.
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
    /// As reports call it.
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

    /// The configurations with these bitmaps, by their places.
    pub fn with(bitmaps: Bitmaps) -> Vec<usize> {
        let is_with = |index: &usize| CONFIGURATIONS[*index].bitmaps == bitmaps;
        (0..CONFIGURATIONS.len()).filter(is_with).collect()
    }

    /// The server ignores flushes, so what it acknowledged must get lost.
    pub fn is_control(self) -> bool {
        self.cache == "unsafe"
    }

    /// The server's promise of a plain write.
    pub fn writes(self) -> Writes {
        match self.cache {
            "writethrough" | "directsync" => Writes::Durable,
            _ => Writes::Volatile,
        }
    }

    /// Bytes of the disk: as few as the file system can do with, for there are many copies.
    pub fn disk_size(self) -> u64 {
        match self.layer {
            XFS => 320 << 20,
            EXT4 => 24 << 20,
            // Tables need more room than there is in the image.
            Layer::Device if self.format == "qcow2" => 2 * history::SIZE,
            Layer::Device => history::SIZE,
        }
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
