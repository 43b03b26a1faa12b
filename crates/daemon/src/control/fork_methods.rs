//! What the method of forks takes and gives.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Disks to be forked at one moment.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ForkParams {
    /// Each of them once.
    pub disks: Vec<ForkDiskParams>,
}

/// A disk to be forked.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ForkDiskParams {
    /// Its name.
    pub disk: String,
    /// The qcow2 file in which it goes on, an absolute path at which nothing is yet. Left out: a name beside its image, and
    /// none for a read-only disk.
    pub overlay: Option<PathBuf>,
    /// Other qcow2 files over what it is at the moment.
    #[serde(default)]
    pub children: Vec<ForkChildParams>,
}

/// A new file over what a disk is at the moment of its fork.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ForkChildParams {
    /// An absolute path at which nothing is yet.
    pub path: PathBuf,
    /// The name of the disk as which this server opens it at once. Left out: it stays a file.
    pub name: Option<String>,
}

/// What was forked.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct ForkResult {
    /// For how long the guests' changes were held off, in microseconds.
    pub pause_us: u64,
    /// The disks, in their order.
    pub disks: Vec<ForkedDisk>,
}

/// A disk that was forked.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ForkedDisk {
    /// Its name.
    pub disk: String,
    /// The image that it was, which nobody may change from now on.
    pub layer: PathBuf,
    /// The image in which it goes on. Left out for a read-only disk, which goes on as it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overlay: Option<PathBuf>,
    /// The other images over the layer.
    pub children: Vec<PathBuf>,
}
