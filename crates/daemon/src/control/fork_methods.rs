//! What the method of forks takes and gives.

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

/// What was forked.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct ForkResult {
    /// For how long the guests' changes were held off, in microseconds.
    pub pause_us: u64,
    /// The disks, in their order.
    pub disks: Vec<ForkedDisk>,
}
