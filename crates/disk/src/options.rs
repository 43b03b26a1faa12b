//! How a disk is used: the options that are chosen when it is opened.

use std::time::Duration;

use blockhouse_core::Durability;
use blockhouse_format::OpenOptions;
pub use blockhouse_format::{Access, BitmapActivity, Discard};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The treatment of writes whose bytes are all zero, as QEMU's `detect-zeroes`.
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DetectZeroes {
    /// The zeros are written.
    #[default]
    Off,
    /// The writes become zero writes that keep the allocated space.
    On,
    /// The writes become zero writes that may free the allocated space, as far as discards do.
    Unmap,
}

/// The treatment of flushes and durable writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushPolicy {
    /// Flushes and durable writes are carried out.
    Honor,
    /// Flushes and durable writes are acknowledged, but nothing is flushed, so a crash of the host
    /// loses data. For disks that are deleted after use (`--cache unsafe`).
    Ignore,
}

/// The block sizes that a disk announces instead of the sizes that follow from its image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockSizes {
    logical: Option<u64>,
    physical: Option<u64>,
    discard: Option<u64>,
}

impl BlockSizes {
    /// The sizes that follow from the image.
    pub const OF_IMAGE: Self = Self { logical: None, physical: None, discard: None };

    /// Maximum bytes of a sector, because Linux supports no sector larger than its smallest page.
    const MAX_LOGICAL: u64 = 4096;
    const MAX_PHYSICAL: u64 = 2 << 20;
    const MAX_DISCARD: u64 = 1 << 30;

    /// Sizes in bytes: `logical` of a sector, `physical` of a block that is written as a whole, and
    /// `discard` of the unit of discards. `None` is the size that follows from the image.
    ///
    /// # Errors
    /// The reason why a disk cannot have such sizes, as text.
    pub fn new(
        logical: Option<u64>,
        physical: Option<u64>,
        discard: Option<u64>,
    ) -> Result<Self, String> {
        let sizes = [
            ("logical-block-size", logical, Self::MAX_LOGICAL),
            ("physical-block-size", physical, Self::MAX_PHYSICAL),
            ("discard-granularity", discard, Self::MAX_DISCARD),
        ];
        for (name, size, most) in sizes {
            let is_possible = |size: u64| size.is_power_of_two() && (512..=most).contains(&size);
            if let Some(size) = size.filter(|&size| !is_possible(size)) {
                return Err(format!("{name} {size}: use a power of two from 512 to {most}"));
            }
            if let (Some(size), Some(logical)) = (size, logical)
                && size < logical
            {
                return Err(format!("{name} {size} is less than logical-block-size {logical}"));
            }
        }
        Ok(Self { logical, physical, discard })
    }

    /// Bytes of a sector.
    pub fn logical(self) -> Option<u64> {
        self.logical
    }

    /// Bytes of a block that is written as a whole.
    pub fn physical(self) -> Option<u64> {
        self.physical
    }

    /// Bytes of the unit of discards.
    pub fn discard(self) -> Option<u64> {
        self.discard
    }
}

/// The treatment of changes for which the host has no free space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnFull {
    /// The changes fail with ENOSPC.
    #[default]
    Report,
    /// The changes wait for free space, each for at most this time, and then fail with ENOSPC.
    Hold(Duration),
}

impl OnFull {
    /// The default of the longest time for which a change is held.
    pub const DEFAULT_LIMIT: Duration = Duration::from_secs(300);

    /// The treatment for the options of the command line: whether changes wait, and for how many
    /// seconds at most.
    ///
    /// # Errors
    /// The reason why the options contradict each other, as text.
    pub fn new(is_held: bool, seconds: Option<u32>) -> Result<Self, String> {
        match (is_held, seconds) {
            (false, None) => Ok(Self::Report),
            (false, Some(_)) => Err("hold-seconds needs on-full hold".into()),
            (true, None) => Ok(Self::Hold(Self::DEFAULT_LIMIT)),
            (true, Some(0)) => {
                Err("hold-seconds 0 holds nothing: use 1 or more, or on-full report".into())
            }
            (true, Some(seconds)) => Ok(Self::Hold(Duration::from_secs(seconds.into()))),
        }
    }

    /// The number of seconds for which changes wait at most; `None` if they do not wait.
    pub fn seconds(self) -> Option<u32> {
        match self {
            Self::Report => None,
            Self::Hold(limit) => Some(limit.as_secs().try_into().unwrap_or(u32::MAX)),
        }
    }
}

/// How a disk is opened.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Whether the disk may be changed.
    pub access: Access,
    /// The minimum durability of each write; `Data` is the writethrough of cache modes.
    pub durability: Durability,
    /// Whether flushes are carried out.
    pub flush: FlushPolicy,
    /// Whether discards are passed on.
    pub discard: Discard,
    /// Whether writes of zeros become zero writes.
    pub detect_zeroes: DetectZeroes,
    /// Whether writes of whole clusters are stored in compressed form, where that saves space.
    pub compress: bool,
    /// Whether data that is read from the backing file is copied into the image, if the image may
    /// be changed.
    pub copy_on_read: bool,
    /// How changes are recorded in bitmaps.
    pub bitmap_activity: BitmapActivity,
    /// The block sizes that the disk announces.
    pub block_sizes: BlockSizes,
    /// The treatment of changes for which the host has no free space.
    pub on_full: OnFull,
    /// Whether another program may change the image until it is opened again.
    pub is_inactive: bool,
}

impl Default for Options {
    /// Read and write, a volatile write cache, flushes carried out, discards passed on, zeros
    /// written, no copy on read, ENOSPC reported.
    fn default() -> Self {
        Self {
            access: Access::ReadWrite,
            durability: Durability::None,
            flush: FlushPolicy::Honor,
            discard: Discard::Unmap,
            detect_zeroes: DetectZeroes::Off,
            compress: false,
            copy_on_read: false,
            bitmap_activity: BitmapActivity::default(),
            block_sizes: BlockSizes::OF_IMAGE,
            on_full: OnFull::Report,
            is_inactive: false,
        }
    }
}

impl Options {
    /// The options that the format uses.
    pub(crate) fn of_format(self) -> OpenOptions {
        let Self { access, discard, bitmap_activity, .. } = self;
        OpenOptions { access, discard, bitmap_activity }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_block_sizes_are_refused() {
        let some = BlockSizes::new(Some(4096), Some(65536), Some(1 << 20)).expect("they fit");
        assert_eq!(some.logical(), Some(4096));
        assert_eq!(BlockSizes::new(None, None, None), Ok(BlockSizes::OF_IMAGE));
        for (sizes, why) in [
            ([Some(256), None, None], "logical-block-size 256"),
            ([Some(8192), None, None], "from 512 to 4096"),
            ([None, Some(1000), None], "physical-block-size 1000"),
            ([None, None, Some(0)], "discard-granularity 0"),
            ([Some(4096), Some(512), None], "is less than"),
            ([Some(4096), None, Some(1024)], "is less than"),
        ] {
            let [logical, physical, discard] = sizes;
            let error = BlockSizes::new(logical, physical, discard).expect_err(why);
            assert!(error.contains(why), "{error}");
        }
    }
}
