//! What the method of transactions takes.

use schemars::JsonSchema;
use serde::Deserialize;

use super::bitmap_methods::{BitmapAddParams, BitmapMergeParams, BitmapParams};

/// Changes that are made at one moment, all or none.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TransactionParams {
    /// Changes of bitmaps, of one or several disks, each of which finds what those before it have made.
    pub bitmaps: Vec<BitmapChangeParams>,
}

/// A change of a bitmap: an object with one key, and the parameters of the method of that name as its value.
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
