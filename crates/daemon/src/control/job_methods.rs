//! The parameters and results of the `job.*` methods.

use std::path::PathBuf;

use blockhouse_config::text_fields::{Size, some_size, some_text};
use blockhouse_disk::ImageFormat;
use blockhouse_jobs::CopyMode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A job.
#[derive(Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct JobParams {
    /// The name.
    pub job: String,
}

/// The kind of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum JobKind {
    /// Copies the disk to the target while the guest goes on.
    Mirror,
    /// Copies the data of the disk's image into its backing file while the guest continues. With a
    /// layer as `top`: merges the layers from `top` down into `base`, which takes their place.
    Commit,
    /// Copies the data that the disk reads from its backing files into its image while the guest
    /// continues, and detaches them. With `base`: only those above `base`, which takes their place.
    Stream,
}

/// A job to be started.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct JobStartParams {
    /// The kind.
    pub kind: JobKind,
    /// The name of the disk.
    pub disk: String,
    /// Of a mirror, where to: an absolute path, or the URI of an export of another server.
    pub target: Option<PathBuf>,
    /// Of a mirror, another disk of this server in the place of `target`: all that is in it is
    /// lost. The disk of this name ends when the guest continues in it.
    pub target_disk: Option<String>,
    /// The job's name, unlike all others. Left out: any name.
    pub job: Option<String>,
    /// Of a mirror, the target's format, raw or qcow2. Left out, a file's name decides (.qcow2,
    /// otherwise raw); all else is raw.
    #[serde(default, deserialize_with = "some_text")]
    #[schemars(with = "Option<String>")]
    pub format: Option<ImageFormat>,
    /// Of a mirror, whether a target that exists is overwritten: all that is in it is lost.
    #[serde(default)]
    pub overwrite: bool,
    /// Of a commit, whether what an encrypted image has may be stored in a backing file that is
    /// not encrypted.
    #[serde(default)]
    pub decrypt: bool,
    /// Of a commit, the highest image that is merged: an absolute path, or the name that the chain
    /// has for it. Left out: that of the disk.
    pub top: Option<PathBuf>,
    /// Of a stream, the backing file further down the chain that the image keeps; left out: none.
    /// Of a commit, the image into which the others from `top` on are merged; left out: the disk's
    /// backing file, or, if `top` is a layer, the last image of the chain. Named as `top`.
    pub base: Option<PathBuf>,
    /// Of a commit of layers, the base's name in the header of the image above `top`. Left out: its
    /// path.
    pub backing_file: Option<String>,
    /// Of a commit, and of a stream to a base, whether the files that are no longer in the chain
    /// are removed. Refused where another image is known to stand on one of them.
    #[serde(default)]
    pub delete: bool,
    /// Of a mirror or a commit, whether the guest's writes wait for their copy: auto, background
    /// or write-blocking. Left out: auto.
    #[serde(default)]
    pub mode: CopyMode,
    /// The most bytes a second that are copied in the background: a number, or a text like "100M".
    /// Left out: no limit.
    #[serde(default, deserialize_with = "some_size")]
    #[schemars(with = "Option<Size>")]
    pub speed: Option<u64>,
}

/// A limit.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct JobSpeedParams {
    /// The job's name.
    pub job: String,
    /// The most bytes a second that are copied in the background: a number, or a text like "100M".
    /// Left out, or 0: no limit.
    #[serde(default, deserialize_with = "some_size")]
    #[schemars(with = "Option<Size>")]
    pub speed: Option<u64>,
}

/// How a job is completed.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct JobCompleteParams {
    /// The job's name.
    pub job: String,
    /// Of a mirror, whether the disk refuses all changes from then on, because its guest goes on
    /// with the target on another host. Otherwise the guest goes on with the target here.
    #[serde(default)]
    pub hand_over: bool,
    /// Of a mirror, whether the guest goes on with the disk, and the target is a copy of it at
    /// this moment.
    #[serde(default)]
    pub copy: bool,
}

/// A job that goes on or has ended.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct JobInfo {
    /// The name.
    pub job: String,
    /// The kind: mirror, commit, stream or backup.
    pub kind: &'static str,
    /// The name of its disk.
    pub disk: String,
    /// Where to.
    pub target: String,
    /// running, paused, ready, completing, completed, cancelled or failed.
    pub status: &'static str,
    /// Why it failed, in one line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Bytes that were copied, those that were copied again included.
    pub copied: u64,
    /// Bytes that have to be copied still, as far as is known.
    pub remaining: u64,
    /// The sum of both.
    pub total: u64,
    /// Bytes a second that were copied lately.
    pub rate: u64,
    /// The most bytes a second in the background.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speed: Option<u64>,
}
