//! Parameters of the method that creates an image.

use std::path::PathBuf;

use blockhouse_config::text_fields::{Size, some_size, text};
use blockhouse_disk::{Compression, ImageFormat};
use schemars::JsonSchema;
use serde::Deserialize;

/// A new image.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct ImageCreateParams {
    /// Where: an absolute path.
    pub path: PathBuf,
    /// raw or qcow2.
    #[serde(deserialize_with = "text")]
    #[schemars(with = "String")]
    pub format: ImageFormat,
    /// Bytes of the disk, a multiple of 512.
    pub size: u64,
    /// Whether a file that is there becomes the image: all that is in it is lost.
    #[serde(default)]
    pub overwrite: bool,
    /// Of qcow2, the backing file, found from the image's folder.
    pub backing: Option<String>,
    /// The format of the backing file, which has to be told with it.
    pub backing_format: Option<String>,
    /// Of qcow2, the file or device that has the guest's data, which is there already: an absolute
    /// path. What is in it stays where it is the raw disk, and is lost otherwise.
    pub data_file: Option<PathBuf>,
    /// Whether the data file is the raw disk.
    #[serde(default)]
    pub data_file_raw: bool,
    /// Of qcow2, bytes of a cluster: a power of two from 512 to 2 MiB. Left out: 64 KiB.
    #[serde(default, deserialize_with = "some_size")]
    #[schemars(with = "Option<Size>")]
    pub cluster_size: Option<u64>,
    /// Of qcow2, bits of a refcount: 1, 2, 4, 8, 16, 32 or 64. Left out: 16.
    pub refcount_bits: Option<u32>,
    /// Of qcow2, whether clusters have 32 subclusters each.
    #[serde(default)]
    pub extended_l2: bool,
    /// Of qcow2, whether refcounts may be written late.
    #[serde(default)]
    pub lazy_refcounts: bool,
    /// Of qcow2, how clusters will be compressed: zlib or zstd. Left out: zlib.
    pub compression: Option<Compression>,
}
