//! Parameters of the method of transactions.

use std::path::PathBuf;

use blockhouse_config::text_fields::{Size, some_size};
use schemars::JsonSchema;
use serde::Deserialize;

use super::bitmap_methods::{BitmapAddParams, BitmapMergeParams, BitmapParams};

/// Changes that are made at one moment, all or none.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TransactionParams {
    /// Changes of bitmaps, of one or several disks, in this order: each change sees the results of
    /// those before it.
    #[serde(default)]
    pub bitmaps: Vec<BitmapChangeParams>,
    /// Backups that begin.
    #[serde(default)]
    pub backups: Vec<BackupPartParams>,
}

/// A backup that begins in a transaction.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct BackupPartParams {
    /// The name of the disk.
    pub disk: String,
    /// The name of the job that copies it, or, without `target-disk`, of the backup.
    pub name: String,
    /// The disk of this server to which a job copies it. The job overwrites all of that disk, or
    /// with `bitmap` only the ranges that the bitmap marks. Left out: `export.add` serves the disk
    /// as it was, which is called DISK@NAME, until `backup.end`.
    pub target_disk: Option<String>,
    /// The bitmap that says what a job copies. Left out: all.
    pub bitmap: Option<String>,
    /// Whether, when the job is complete, the bitmap has only the changes since the backup began.
    #[serde(default)]
    pub sync_bitmap: bool,
    /// Without `target-disk`, the folder of the scratch file, an absolute path. Left out: that of
    /// the disk's image.
    pub scratch: Option<PathBuf>,
    /// The most bytes a second that a job copies: a number, or a text like "100M". Left out: no
    /// limit.
    #[serde(default, deserialize_with = "some_size")]
    #[schemars(with = "Option<Size>")]
    pub speed: Option<u64>,
}

/// A change of a bitmap: an object with one key, and the parameters of the method of that name as
/// its value.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BitmapChangeParams {
    /// As `bitmap.add`.
    Add(BitmapAddParams),
    /// As `bitmap.remove`.
    Remove(BitmapParams),
    /// As `bitmap.clear`.
    Clear(BitmapParams),
    /// As `bitmap.enable`.
    Enable(BitmapParams),
    /// As `bitmap.disable`.
    Disable(BitmapParams),
    /// As `bitmap.merge`.
    Merge(BitmapMergeParams),
}
