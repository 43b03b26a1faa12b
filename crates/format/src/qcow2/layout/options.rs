//! Properties of an image that its creator or its user chooses.

pub use crate::{Access, Discard};

/// Which revision of the format a new image has.
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
    /// Its name, as bytes of the host's file system; relative to the image's folder.
    pub name: Vec<u8>,
    /// Its format, if the image says it.
    pub format: Option<String>,
}

/// The image's description of its data file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataFile {
    /// Its name, as bytes of the host's file system; relative to the image's folder.
    pub name: Vec<u8>,
    /// Whether it reads as the guest's disk without the image.
    pub raw: Switch,
}

impl DataFile {
    pub(crate) fn is_raw_disk(&self) -> bool {
        self.raw == Switch::On
    }
}

/// How changes are recorded in bitmaps before they are made: what a crash may leave said to have
/// changed that has not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitmapActivity {
    /// Bytes of the disk that are said to change together, before the first change in them: a
    /// power of two. Where one bit stands for more, that.
    pub extent_size: u64,
    /// How many extents at most are said to change as a whole, but for those of requests in
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
