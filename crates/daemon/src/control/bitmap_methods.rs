//! The parameters and results of the methods of bitmaps.

use blockhouse_config::text_fields::{Size, some_size};
use blockhouse_disk::Bitmap;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A bitmap of a disk.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BitmapParams {
    /// The name of the disk.
    pub disk: String,
    /// The bitmap's name.
    pub name: String,
}

/// A bitmap to be added.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BitmapAddParams {
    /// The name of the disk.
    pub disk: String,
    /// The new name: 1 to 1023 bytes, unlike all others of the image.
    pub name: String,
    /// How many bytes of the disk one bit stands for: a power of two, 512 to 2 GiB, or a text like
    /// "64K". Left out: a cluster, but 4 KiB at least and 64 KiB at most.
    #[serde(default, deserialize_with = "some_size")]
    #[schemars(with = "Option<Size>")]
    pub granularity: Option<u64>,
    /// Whether nothing is recorded in it before it is enabled.
    #[serde(default)]
    pub disabled: bool,
    /// Whether the bitmap is in memory only, with an image of any format. Such a bitmap is lost
    /// when the disk is closed or the server is upgraded.
    #[serde(default)]
    pub transient: bool,
}

/// A bitmap that gets the changes of another one.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct BitmapMergeParams {
    /// The name of the disk.
    pub disk: String,
    /// The bitmap that gets them.
    pub name: String,
    /// The bitmap that has them.
    pub source: String,
    /// The disk of `source`, if it is another disk. The bitmap that gets the changes must then be
    /// in memory only.
    #[serde(default)]
    pub source_disk: Option<String>,
}

/// A bitmap, with the keys of QEMU's `query-block`.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct BitmapInfo {
    /// The name.
    pub name: String,
    /// How many bytes of the disk one bit stands for.
    pub granularity: u64,
    /// Whether changes are recorded in it.
    pub recording: bool,
    /// Whether it is in the image, and not in memory alone.
    pub persistent: bool,
    /// Whether it lacks changes that another program has made, or that could not be recorded: it
    /// can only be removed.
    pub inconsistent: bool,
    /// The time since which it lacks changes, in seconds since 1970-01-01 UTC, if this server could
    /// not record them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lacks_changes_since: Option<u64>,
    /// Whether NBD clients may ask for it: it cannot be removed.
    pub busy: bool,
    /// How many bytes have changed, in whole granules; left out where it is inconsistent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
}

impl BitmapInfo {
    /// The description of a bitmap.
    pub(super) fn new(bitmap: Bitmap, busy: bool, count: Option<u64>) -> Self {
        let Bitmap { name, granularity, lacks_since, .. } = bitmap;
        let Bitmap { is_enabled, is_persistent: persistent, is_inconsistent, .. } = bitmap;
        let recording = is_enabled && !is_inconsistent;
        let lacks_changes_since = lacks_since.map(|since| since.as_secs());
        let inconsistent = is_inconsistent;
        Self {
            name,
            granularity,
            recording,
            persistent,
            inconsistent,
            lacks_changes_since,
            busy,
            count,
        }
    }
}
