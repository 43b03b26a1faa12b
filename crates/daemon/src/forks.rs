//! The parameters and the result of a fork for each disk, in control requests and replies.

use std::path::PathBuf;

use blockhouse_config::text_fields::{lossy, some_lossy};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A disk to be forked.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ForkDiskParams {
    /// The name.
    pub disk: String,
    /// The qcow2 file in which it goes on, an absolute path at which nothing is yet. Left out: a
    /// name beside its image, or, with `children`, its present overlay if nothing was written to
    /// that overlay. A read-only disk and a disk in Ceph have none.
    pub overlay: Option<PathBuf>,
    /// Whether the overlay is there already: a qcow2 image as long as the disk to which nothing
    /// was written, and which no other disk has. Its header gets the name of the layer.
    #[serde(default)]
    pub made: bool,
    /// Other qcow2 files over the disk's content at the fork. Of a disk in Ceph, clones of it.
    #[serde(default)]
    pub children: Vec<ForkChildParams>,
}

/// A new file over what a disk is at the moment of its fork.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ForkChildParams {
    /// An absolute path at which nothing is yet, or of a clone `rbd:POOL/IMAGE`.
    pub path: PathBuf,
    /// The name of the disk as which this server opens it at once. Left out: it stays a file.
    pub name: Option<String>,
}

/// A disk that was forked.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ForkedDisk {
    /// The name.
    pub disk: String,
    /// The image with what the disk is at the fork. If the disk goes on in an overlay, no program
    /// may change it.
    #[serde(serialize_with = "lossy")]
    pub layer: PathBuf,
    /// The image in which it goes on. Left out for a read-only disk and for one in Ceph, which go
    /// on as they are.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "some_lossy")]
    pub overlay: Option<PathBuf>,
    /// The other images over the layer, or the clones.
    pub children: Vec<PathBuf>,
}
