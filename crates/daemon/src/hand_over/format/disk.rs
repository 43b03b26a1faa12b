//! A disk in an offer: the options with which it was opened, under the keys of `disk.open`, and the
//! changes since.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Error, Result};
use blockhouse_config::disk::{DiskConfig, OnFullName};
use blockhouse_config::export_address::ExportAddress;
use blockhouse_config::limits::LimitsConfig;
use blockhouse_disk::{DetectZeroes, Discard};
use serde::{Deserialize, Serialize};

use crate::running::Moved;

/// An open disk, with all files of its chain, from the top.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Disk {
    /// The options with which it was opened.
    pub opened: Opened,
    /// The image that has replaced the one that was opened, if any.
    pub moved: Option<MovedTo>,
    /// Whether it was made read-only after it was opened.
    pub is_protected: bool,
    /// The limits.
    pub limits: Option<Limits>,
    /// The write threshold: an event reports when the image uses more bytes of its storage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_threshold: Option<u64>,
    /// The files: for each image of the chain its file, then its data file if it has one.
    pub files: Vec<File>,
    /// The rest of the chain below `files`, if another disk of the offer has it too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stands_on: Option<StandsOn>,
}

/// An image of an earlier disk of the offer, with its backing files, which this disk shares.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct StandsOn {
    /// The index of the earlier disk in the offer.
    pub disk: usize,
    /// The image's depth in that disk's chain; 0 is the disk's own image.
    pub depth: usize,
}

/// A file.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct File {
    /// The path by which it was opened.
    pub path: String,
    /// Whether the file is open a second time, for the last block.
    pub has_tail: bool,
    /// Whether the file is open once more, for flushes.
    pub has_flushed: bool,
}

/// The options with which a disk is opened.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Opened {
    /// The name.
    pub name: String,
    /// The bytes of the image's path or address.
    pub path: Vec<u8>,
    /// The image's format; `None`: the name decides.
    pub format: Option<String>,
    /// Whether it was opened for reading only.
    pub read_only: bool,
    /// The host's cache.
    pub cache: String,
    /// The effect of discards.
    pub discard: Discard,
    /// The treatment of writes of zeros.
    pub detect_zeroes: DetectZeroes,
    /// The block sizes that it announces: logical, physical, and the discard granularity.
    #[serde(default, skip_serializing_if = "is_of_image")]
    pub block_sizes: [Option<u64>; 3],
    /// For how many seconds writes that get ENOSPC are held; `None`: not at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold_seconds: Option<u32>,
    /// The threshold: an event reports when the host has less space left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threshold: Option<String>,
    /// Whether data read from the backing file is copied into the image.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub copy_on_read: bool,
    /// The rate, in bytes a second, at which the backing file's data is copied into the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefetch: Option<u64>,
    /// The size of the disk to create if the image does not exist.
    pub create: Option<u64>,
    /// The snapshot that is served.
    pub snapshot: Option<String>,
    /// The bytes of the paths that the image may refer to.
    pub allow_paths: Vec<Vec<u8>>,
    /// Whether the image may refer to exports of other servers.
    pub allow_remote: bool,
    /// Whether the image may refer to no other file.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_references: bool,
    /// Whether the image is opened without its backing file.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub without_backing: bool,
    /// The bytes of the path of its data file, if that is not the file that the image names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_file: Option<Vec<u8>>,
    /// The bitmaps that NBD clients may ask for.
    pub bitmaps: Vec<String>,
    /// Whether bitmaps that the image does not have are looked up in its backing files.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub bitmaps_behind: bool,
    /// The bytes of the path of its side file for bitmaps, and whether these bitmaps are trusted
    /// (`trust-bitmaps`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bitmaps_in: Option<(Vec<u8>, bool)>,
    /// The limits that it was opened with.
    pub limits: Option<Limits>,
}

/// The image to which a job has moved a disk.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct MovedTo {
    /// The bytes of the path.
    pub path: Vec<u8>,
    /// The format.
    pub format: String,
    /// The host's cache.
    pub cache: String,
}

/// Limits. The destination applies them without the burst credit or debt that the source had.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Limits {
    /// The group that shares them.
    pub group: Option<String>,
    /// Operations a second: all, reads, writes.
    pub operations: [Option<u64>; 3],
    /// Bytes a second: all, reads, writes.
    pub bytes: [Option<u64>; 3],
    /// The burst: its rate in percent of the rates above, and for how many nanoseconds.
    pub burst: Option<(u32, u64)>,
}

/// A disk of the command line or the configuration, to be compared with the configuration at the
/// next reload.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Configured {
    /// The options with which the next server opens it.
    pub opened: Opened,
    /// The addresses at which the next server serves it.
    pub exports: Vec<Export>,
}

/// The address at which a disk is served.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Export {
    /// An export to NBD clients, by its URI.
    Nbd(String),
    /// A vhost-user-blk device, by the bytes of its socket's path.
    VhostUser(Vec<u8>),
    /// A block device of the host, by its number.
    Ublk(u32),
}

fn is_of_image(sizes: &[Option<u64>; 3]) -> bool {
    *sizes == [None; 3]
}

fn bytes_of(path: &Path) -> Vec<u8> {
    path.as_os_str().as_bytes().to_vec()
}

fn path_of(bytes: Vec<u8>) -> PathBuf {
    PathBuf::from(OsString::from_vec(bytes))
}

impl Opened {
    /// The record of a disk for the other process.
    ///
    /// # Errors
    /// There is no error if the description was checked.
    pub fn of(disk: &DiskConfig) -> Result<Self> {
        let hold_seconds = disk.on_full().map_err(Error::msg)?.seconds();
        // The pattern lists all fields, so that the compiler reports a new option that is not
        // handed over.
        let DiskConfig {
            name,
            path,
            format,
            read_only,
            cache,
            discard,
            detect_zeroes,
            logical_block_size,
            physical_block_size,
            discard_granularity,
            on_full: _,
            hold_seconds: _,
            threshold,
            copy_on_read,
            prefetch,
            snapshot,
            create,
            allow_paths,
            allow_remote,
            no_references,
            without_backing,
            data_file,
            // Disks with keys are not handed over.
            key_files: _,
            passphrase_files: _,
            bitmaps,
            bitmaps_behind,
            bitmaps_in,
            trust_bitmaps,
            limits,
            // An offer lists exports beside the disks.
            exports: _,
            // Inactive disks, those that are parts of files, and those that compress are not handed
            // over.
            is_inactive: _,
            compress: _,
            part: _,
        } = disk;
        Ok(Self {
            name: name.clone().unwrap_or_default(),
            path: bytes_of(path),
            format: format.map(|format| format.as_str().to_owned()),
            read_only: *read_only,
            cache: cache.as_str().to_owned(),
            discard: *discard,
            detect_zeroes: *detect_zeroes,
            block_sizes: [*logical_block_size, *physical_block_size, *discard_granularity],
            hold_seconds,
            threshold: threshold.map(|threshold| threshold.to_string()),
            copy_on_read: *copy_on_read,
            prefetch: *prefetch,
            create: *create,
            snapshot: snapshot.clone(),
            allow_paths: allow_paths.iter().map(|path| bytes_of(path)).collect(),
            allow_remote: *allow_remote,
            no_references: *no_references,
            without_backing: *without_backing,
            data_file: data_file.as_deref().map(bytes_of),
            bitmaps: bitmaps.clone(),
            bitmaps_behind: *bitmaps_behind,
            bitmaps_in: bitmaps_in.as_ref().map(|path| (bytes_of(path), *trust_bitmaps)),
            limits: Limits::of(limits)?,
        })
    }

    /// The disk's configuration.
    ///
    /// # Errors
    /// The record has a name that this version does not know.
    pub fn config(self) -> Result<DiskConfig> {
        let [logical_block_size, physical_block_size, discard_granularity] = self.block_sizes;
        let (bitmaps_in, trust_bitmaps) = self.bitmaps_in.unzip();
        let disk = DiskConfig {
            name: Some(self.name),
            path: path_of(self.path),
            format: self.format.as_deref().map(parsed).transpose()?,
            read_only: self.read_only,
            cache: parsed(&self.cache)?,
            discard: self.discard,
            detect_zeroes: self.detect_zeroes,
            logical_block_size,
            physical_block_size,
            discard_granularity,
            on_full: if self.hold_seconds.is_some() {
                OnFullName::Hold
            } else {
                OnFullName::Report
            },
            hold_seconds: self.hold_seconds,
            threshold: self.threshold.as_deref().map(parsed).transpose()?,
            copy_on_read: self.copy_on_read,
            prefetch: self.prefetch,
            snapshot: self.snapshot,
            create: self.create,
            allow_paths: self.allow_paths.into_iter().map(path_of).collect(),
            allow_remote: self.allow_remote,
            no_references: self.no_references,
            without_backing: self.without_backing,
            data_file: self.data_file.map(path_of),
            bitmaps: self.bitmaps,
            bitmaps_behind: self.bitmaps_behind,
            bitmaps_in: bitmaps_in.map(path_of),
            trust_bitmaps: trust_bitmaps.unwrap_or_default(),
            limits: self.limits.map(Limits::config).transpose()?.unwrap_or_default(),
            ..DiskConfig::default()
        };
        disk.block_sizes().map_err(Error::msg)?;
        disk.on_full().map_err(Error::msg)?;
        Ok(disk)
    }
}

/// Parses a name that the other process sent.
fn parsed<T: FromStr<Err = String>>(text: &str) -> Result<T> {
    text.parse().map_err(Error::msg)
}

impl From<&Moved> for MovedTo {
    fn from(moved: &Moved) -> Self {
        Self {
            path: bytes_of(&moved.path),
            format: moved.format.as_str().to_owned(),
            cache: moved.cache.as_str().to_owned(),
        }
    }
}

impl MovedTo {
    /// Parses the record.
    ///
    /// # Errors
    /// The record has a name that this version does not know.
    pub fn moved(self) -> Result<Moved> {
        Ok(Moved {
            path: path_of(self.path),
            format: parsed(&self.format)?,
            cache: parsed(&self.cache)?,
        })
    }
}

impl Limits {
    /// The record of the limits for the other process; `None` if there are no limits.
    ///
    /// # Errors
    /// There is no error if the limits were checked.
    pub fn of(limits: &LimitsConfig) -> Result<Option<Self>> {
        if limits.is_off() {
            return Ok(None);
        }
        let burst = limits.rates().map_err(Error::msg)?.burst;
        let burst = burst
            .map(|burst| ((burst.factor() * 100.0).round() as u32, burst.time().as_nanos() as u64));
        Ok(Some(Self {
            group: limits.group.clone(),
            operations: [limits.iops, limits.iops_read, limits.iops_write],
            bytes: [limits.bps, limits.bps_read, limits.bps_write],
            burst,
        }))
    }

    /// The limits to apply.
    ///
    /// # Errors
    /// A burst or a rate is invalid.
    pub fn config(self) -> Result<LimitsConfig> {
        let [iops, iops_read, iops_write] = self.operations;
        let [bps, bps_read, bps_write] = self.bytes;
        let (percent, time) = self.burst.unzip();
        let limits = LimitsConfig {
            group: self.group,
            iops,
            iops_read,
            iops_write,
            bps,
            bps_read,
            bps_write,
            burst: percent.map(|percent| f64::from(percent) / 100.0),
            burst_seconds: time.map(|time| Duration::from_nanos(time).as_secs_f64()),
        };
        limits.check().map_err(Error::msg)?;
        Ok(limits)
    }
}

impl From<&ExportAddress> for Export {
    fn from(address: &ExportAddress) -> Self {
        match address {
            ExportAddress::Nbd(uri) => Self::Nbd(uri.to_string()),
            ExportAddress::VhostUser(path) => Self::VhostUser(bytes_of(path)),
            ExportAddress::Ublk(id) => Self::Ublk(*id),
        }
    }
}

impl Configured {
    /// The record of a disk for the other process.
    ///
    /// # Errors
    /// There is no error if the description was checked.
    pub fn of(disk: &DiskConfig) -> Result<Self> {
        let exports = disk.exports.iter().map(Export::from).collect();
        Ok(Self { opened: Opened::of(disk)?, exports })
    }

    /// The disk's configuration, with its exports.
    ///
    /// # Errors
    /// The record has a name that this version does not know.
    pub fn disk(self) -> Result<DiskConfig> {
        let address = |export| match export {
            Export::Nbd(uri) => {
                let uri = uri.parse().with_context(|| format!("no URI: {uri}"))?;
                Ok(ExportAddress::Nbd(uri))
            }
            Export::VhostUser(path) => Ok(ExportAddress::VhostUser(path_of(path))),
            Export::Ublk(id) => Ok(ExportAddress::Ublk(id)),
        };
        let exports = self.exports.into_iter().map(address).collect::<Result<_>>()?;
        Ok(DiskConfig { exports, ..self.opened.config()? })
    }
}
