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
}

/// Whether a disk takes FUA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fua {
    Taken,
    Unknown,
}

/// Every layer, format, cache mode, engine and kind of disk, each in the company that is most
/// usual; the last is the control.
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
    Configuration { layer, format, cache, engine, fua }
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
        format!("{format} on {layer}, {fua}, {cache}, {engine}")
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
