//! The parameters and results of the methods of backups.

use std::path::PathBuf;

use blockhouse_config::text_fields::{Size, some_size};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A backup to be begun.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct BackupBeginParams {
    /// The names of the disks.
    pub disks: Vec<String>,
    /// Where they are served for reading, each under its own name: an NBD URI without a name. That
    /// of a single disk may have one. Left out: clients cannot read them before `export.add` of the
    /// frozen disk.
    pub export: Option<String>,
    /// The backup's name, unlike all others. Left out: any name.
    pub backup: Option<String>,
    /// A bitmap that begins on each disk at this moment, for the next increment.
    pub bitmap: Option<String>,
    /// The bitmap that clients may query for changes. A disk without this bitmap is backed up in
    /// full, if another disk of the backup has the bitmap.
    pub since: Option<String>,
    /// The folder of the scratch files, an absolute path. Left out: that of each disk's image.
    pub scratch: Option<PathBuf>,
    /// Bytes that each scratch file may take, or a text like "20G". Left out: as many as its disk
    /// has.
    #[serde(default, deserialize_with = "some_size")]
    #[schemars(with = "Option<Size>")]
    pub scratch_size: Option<u64>,
}

/// A backup.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BackupParams {
    /// The name.
    pub backup: String,
}

/// A backup that has begun.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct BackupInfo {
    /// The name.
    pub backup: String,
    /// For how long the guests' changes were held off, in microseconds.
    pub pause_us: u64,
    /// The bitmap that has begun on each disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bitmap: Option<String>,
    /// The bitmap with the changes. Its metadata context is `qemu:dirty-bitmap:` and this name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
    /// The disks.
    pub disks: Vec<BackupDiskInfo>,
}

/// A disk of a backup.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct BackupDiskInfo {
    /// The disk that goes on.
    pub disk: String,
    /// The name of the disk as it was.
    pub frozen: String,
    /// Where that is served.
    pub exports: Vec<String>,
    /// The bitmap that tells what of it has changed. Left out: it comes in full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
    /// The size in bytes.
    pub size: u64,
    /// Bytes that the scratch file has.
    pub scratch_used: u64,
    /// Bytes that it may have.
    pub scratch_size: u64,
    /// Why the backup of this disk has failed, in one line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}
