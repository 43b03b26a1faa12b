//! How a disk is used: the options that are chosen when it is opened.

use blockhouse_core::Durability;
use blockhouse_format::OpenOptions;
pub use blockhouse_format::{Access, BitmapActivity, Discard};

/// What becomes of writes whose bytes are all zero, as QEMU's `detect-zeroes`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DetectZeroes {
    /// They are written.
    #[default]
    Off,
    /// They become zero writes that keep their space.
    On,
    /// They become zero writes that may give their space back, as far as discards do.
    Unmap,
}

/// What becomes of flushes and durable writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushPolicy {
    /// They are carried out.
    Honor,
    /// They are acknowledged and nothing is flushed: a crash of the host loses data. For disks that are
    /// thrown away afterwards (`--cache unsafe`).
    Ignore,
}

/// How a disk is opened.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Whether it may be changed.
    pub access: Access,
    /// The least durability of each write; `Data` is what cache modes call writethrough.
    pub durability: Durability,
    /// Whether flushes are carried out.
    pub flush: FlushPolicy,
    /// Whether discards are passed on.
    pub discard: Discard,
    /// Whether writes of zeros are made zero writes.
    pub detect_zeroes: DetectZeroes,
    /// Whether what is read from the backing file becomes the image's own, if it may be changed.
    pub copy_on_read: bool,
    /// How changes are recorded in bitmaps.
    pub bitmap_activity: BitmapActivity,
}

impl Default for Options {
    /// Read and write, a volatile write cache, flushes kept, discards passed on, zeros written, no copy on read.
    fn default() -> Self {
        Self {
            access: Access::ReadWrite,
            durability: Durability::None,
            flush: FlushPolicy::Honor,
            discard: Discard::Unmap,
            detect_zeroes: DetectZeroes::Off,
            copy_on_read: false,
            bitmap_activity: BitmapActivity::default(),
        }
    }
}

impl Options {
    /// What of this is the format's concern.
    pub(crate) fn of_format(self) -> OpenOptions {
        let Self { access, discard, bitmap_activity, .. } = self;
        OpenOptions { access, discard, bitmap_activity }
    }
}
