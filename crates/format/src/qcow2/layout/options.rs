//! Properties of an image that its creator or its user chooses.

pub use crate::{Access, Discard};

/// The revision of the format that a new image has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Version {
    /// Version 2, `compat=0.10`: no zero clusters, refcounts of 16 bits, no features.
    V2,
    /// Version 3, `compat=1.1`.
    #[default]
    V3,
}

/// Whether a feature is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Switch {
    /// No.
    #[default]
    Off,
    /// Yes.
    On,
}

impl From<bool> for Switch {
    fn from(is_on: bool) -> Self {
        if is_on { Self::On } else { Self::Off }
    }
}

/// The image's description of its backing file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backing {
    /// The name, as bytes of the host's file system; relative to the image's folder.
    pub name: Vec<u8>,
    /// The backing file's format, if the image states the format.
    pub format: Option<String>,
}

/// The image's description of its data file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataFile {
    /// The name, as bytes of the host's file system; relative to the image's folder.
    pub name: Vec<u8>,
    /// Whether the data file without the image reads as the guest's disk.
    pub raw: Switch,
}

impl DataFile {
    pub(crate) fn is_raw_disk(&self) -> bool {
        self.raw == Switch::On
    }
}

/// How changes of the disk are recorded in bitmaps before they are made. The fields limit how many
/// unchanged bytes are marked as changed after a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitmapActivity {
    /// Bytes of an extent of the disk, a power of two. Before the first change in an extent, the
    /// whole extent is marked as changed. If a bit of the bitmap covers more bytes, an extent has
    /// the bytes of one bit.
    pub extent_size: u64,
    /// The maximum number of extents that are marked as a whole, without the extents of requests in
    /// flight.
    pub max_active: usize,
}

impl BitmapActivity {
    /// 256 extents of 4 MiB.
    pub const DEFAULT: Self = Self { extent_size: 4 << 20, max_active: 256 };
}

impl Default for BitmapActivity {
    /// [`DEFAULT`](Self::DEFAULT).
    fn default() -> Self {
        Self::DEFAULT
    }
}
