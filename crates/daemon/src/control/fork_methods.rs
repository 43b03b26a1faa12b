//! Parameters and results of the methods of forks and rollbacks.

use std::path::PathBuf;

use blockhouse_config::text_fields::lossy;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::forks::{ForkDiskParams, ForkedDisk};

/// Disks to be forked at one moment.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ForkParams {
    /// Each of them once.
    pub disks: Vec<ForkDiskParams>,
}

/// The disks that were forked.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct ForkResult {
    /// For how long the guests' changes were held off, in microseconds.
    pub pause_us: u64,
    /// The disks, in their order.
    pub disks: Vec<ForkedDisk>,
}

/// A disk that is to go back to the layer that its last fork left.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RollbackParams {
    /// The name.
    pub disk: String,
    /// Also while clients use it, which find other bytes then than they know of.
    #[serde(default)]
    pub force: bool,
}

/// A disk that has gone back.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct RollbackResult {
    /// The image that it is again.
    #[serde(serialize_with = "lossy")]
    pub layer: PathBuf,
    /// The image that is gone.
    #[serde(serialize_with = "lossy")]
    pub overlay: PathBuf,
    /// For how long the guests' changes were held off, in microseconds.
    pub pause_us: u64,
}
