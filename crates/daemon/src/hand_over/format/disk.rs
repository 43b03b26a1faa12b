//! A disk in an offer: how it is opened, and what became of it since. In the words of `disk.open`.

use std::ffi::OsString;
use std::num::NonZeroU64;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use blockhouse_disk::{
    Access, BackingUse, BlockSizes, Burst, DetectZeroes, Discard, KeyFiles, OnFull, RateLimits,
    RemoteBacking, SideFile,
};
use serde::{Deserialize, Serialize};

use crate::config::ConfiguredDisk;
use crate::options::limit_options::DiskThrottle;
use crate::running::{ExportAddress, Moved};
use crate::setup::DiskSetup;

/// A disk that is served, with all files of its chain, from the top.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Disk {
    /// How it was opened.
    pub opened: Opened,
    /// The image that has taken the place of the one that it was opened with.
    pub moved: Option<MovedTo>,
    /// Whether it was made read-only.
    pub is_protected: bool,
    /// Its limits.
    pub limits: Option<Limits>,
    /// The files: of each image of the chain the image, then its data file if it has one.
    pub files: Vec<File>,
    /// What comes behind these images.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stands_on: Option<StandsOn>,
}

/// An image that an earlier disk of the offer reads as well, with all behind it.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct StandsOn {
    /// The place of that disk.
    pub disk: usize,
    /// How many steps behind that disk's own image.
    pub depth: usize,
}

/// A file.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct File {
    /// The path by which it was opened.
    pub path: String,
    /// Whether it is open a second time, for the last block.
    pub has_tail: bool,
    /// Whether it is open once more, to be flushed.
    pub has_flushed: bool,
}

/// How a disk is opened.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Opened {
    /// Its name.
    pub name: String,
    /// The bytes of the image's path or address.
    pub path: Vec<u8>,
    /// The image's format; `None`: by its name.
    pub format: Option<String>,
    /// Whether it was opened for reading only.
    pub read_only: bool,
    /// The host's cache.
    pub cache: String,
    /// The effect of discards.
    pub discard: DiscardName,
    /// The treatment of writes of zeros.
    pub detect_zeroes: DetectZeroesName,
    /// The block sizes that it announces: logical, physical, and that of discards.
    #[serde(default, skip_serializing_if = "is_of_image")]
    pub block_sizes: [Option<u64>; 3],
    /// For how many seconds changes that find no room are held; `None`: not at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold_seconds: Option<u32>,
    /// How little room is left when that is told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threshold: Option<String>,
    /// Whether what is read from its backing file becomes its own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub copy_on_read: bool,
    /// The bytes a second that are copied from its backing file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefetch: Option<u64>,
    /// Bytes of the disk that was to be made where the image was missing.
    pub create: Option<u64>,
    /// The snapshot that is served.
    pub snapshot: Option<String>,
    /// The bytes of the paths that the image may name.
    pub allow_paths: Vec<Vec<u8>>,
    /// Whether it may name exports of other servers.
    pub allow_remote: bool,
    /// Whether no name in the image is followed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_references: bool,
    /// Whether its backing file is left out.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub without_backing: bool,
    /// The bitmaps that NBD clients may ask for.
    pub bitmaps: Vec<String>,
    /// The bytes of the path where its bitmaps are, and whether nobody else writes to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bitmaps_in: Option<(Vec<u8>, bool)>,
    /// The limits that it was opened with.
    pub limits: Option<Limits>,
}

/// The effect of discards.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiscardName {
    /// The space goes back to the host.
    Unmap,
    /// Nothing.
    Ignore,
}

/// The treatment of writes of zeros.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DetectZeroesName {
    /// They are written.
    Off,
    /// It is stored that the range is zero.
    On,
    /// So, and its space goes back to the host.
    Unmap,
}

/// Where a mirror has moved a disk.
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

/// Limits, which begin with nothing saved and nothing owed.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Limits {
    /// The group that shares them.
    pub group: Option<String>,
    /// Operations a second: all, reads, writes.
    pub operations: [Option<u64>; 3],
    /// Bytes a second: all, reads, writes.
    pub bytes: [Option<u64>; 3],
    /// By how many hundredths of the rates, and for how many nanoseconds, they may be exceeded.
    pub burst: Option<(u32, u64)>,
}

/// A disk of the command line or the configuration, to be compared with the configuration at the
/// next reload.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Configured {
    /// How it is to be opened.
    pub opened: Opened,
    /// Where it is to be served.
    pub exports: Vec<Export>,
}

/// Where a disk is served.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Export {
    /// To NBD clients: a URI.
    Nbd(String),
    /// To a guest: the bytes of the socket's path.
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

impl From<&DiskSetup> for Opened {
    fn from(setup: &DiskSetup) -> Self {
        // All of them: an option that is not handed over would be lost.
        let DiskSetup {
            name,
            path,
            format,
            access,
            cache,
            discard,
            detect_zeroes,
            block_sizes,
            on_full,
            threshold,
            copy_on_read,
            prefetch,
            create,
            snapshot,
            allow_paths,
            remote_backing,
            no_references,
            // Disks that are parts of files are not handed over.
            part: _,
            backing_use,
            // Disks with keys are not handed over.
            keys: _,
            bitmaps,
            side_file,
            throttle,
        } = setup;
        Self {
            name: name.clone(),
            path: bytes_of(path),
            format: format.map(|format| format.as_str().to_owned()),
            read_only: *access == Access::ReadOnly,
            cache: cache.as_str().to_owned(),
            discard: match discard {
                Discard::Unmap => DiscardName::Unmap,
                Discard::Ignore => DiscardName::Ignore,
            },
            detect_zeroes: match detect_zeroes {
                DetectZeroes::Off => DetectZeroesName::Off,
                DetectZeroes::On => DetectZeroesName::On,
                DetectZeroes::Unmap => DetectZeroesName::Unmap,
            },
            block_sizes: [block_sizes.logical(), block_sizes.physical(), block_sizes.discard()],
            hold_seconds: on_full.seconds(),
            threshold: threshold.map(|threshold| threshold.to_string()),
            copy_on_read: *copy_on_read,
            prefetch: *prefetch,
            create: *create,
            snapshot: snapshot.clone(),
            allow_paths: allow_paths.iter().map(|path| bytes_of(path)).collect(),
            allow_remote: *remote_backing == RemoteBacking::Allowed,
            no_references: *no_references,
            without_backing: *backing_use == BackingUse::LeftOut,
            bitmaps: bitmaps.clone(),
            bitmaps_in: side_file.as_ref().map(|side| (bytes_of(&side.path), side.is_alone)),
            limits: throttle.as_ref().map(Limits::from),
        }
    }
}

impl Opened {
    /// The description of the disk.
    ///
    /// # Errors
    /// A word that this version does not know.
    pub fn setup(self) -> Result<DiskSetup> {
        let [logical, physical, discard] = self.block_sizes;
        let block_sizes = BlockSizes::new(logical, physical, discard);
        let parse = |format: String| format.parse().map_err(|why: String| anyhow!(why));
        Ok(DiskSetup {
            name: self.name,
            path: path_of(self.path),
            format: self.format.map(parse).transpose()?,
            access: if self.read_only { Access::ReadOnly } else { Access::ReadWrite },
            cache: self.cache.parse().map_err(|why: String| anyhow!(why))?,
            discard: match self.discard {
                DiscardName::Unmap => Discard::Unmap,
                DiscardName::Ignore => Discard::Ignore,
            },
            detect_zeroes: match self.detect_zeroes {
                DetectZeroesName::Off => DetectZeroes::Off,
                DetectZeroesName::On => DetectZeroes::On,
                DetectZeroesName::Unmap => DetectZeroes::Unmap,
            },
            block_sizes: block_sizes.map_err(|why| anyhow!(why))?,
            on_full: OnFull::new(self.hold_seconds.is_some(), self.hold_seconds)
                .map_err(|why| anyhow!(why))?,
            threshold: self
                .threshold
                .map(|text| text.parse())
                .transpose()
                .map_err(|why: String| anyhow!(why))?,
            copy_on_read: self.copy_on_read,
            prefetch: self.prefetch,
            create: self.create,
            snapshot: self.snapshot,
            allow_paths: self.allow_paths.into_iter().map(path_of).collect(),
            remote_backing: match self.allow_remote {
                true => RemoteBacking::Allowed,
                false => RemoteBacking::Refused,
            },
            no_references: self.no_references,
            part: None,
            backing_use: match self.without_backing {
                true => BackingUse::LeftOut,
                false => BackingUse::Followed,
            },
            keys: KeyFiles::default(),
            bitmaps: self.bitmaps,
            side_file: self
                .bitmaps_in
                .map(|(path, is_alone)| SideFile { path: path_of(path), is_alone }),
            throttle: self.limits.map(Limits::throttle).transpose()?,
        })
    }
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
    /// The same, read.
    ///
    /// # Errors
    /// A word that this version does not know.
    pub fn moved(self) -> Result<Moved> {
        Ok(Moved {
            path: path_of(self.path),
            format: self.format.parse().map_err(|why: String| anyhow!(why))?,
            cache: self.cache.parse().map_err(|why: String| anyhow!(why))?,
        })
    }
}

impl From<&DiskThrottle> for Limits {
    fn from(throttle: &DiskThrottle) -> Self {
        let DiskThrottle { group, limits } = throttle;
        let RateLimits { iops, iops_read, iops_write, bps, bps_read, bps_write, burst } = limits;
        let rates = |rates: [&Option<NonZeroU64>; 3]| rates.map(|rate| rate.map(NonZeroU64::get));
        let burst = burst
            .map(|burst| ((burst.factor() * 100.0).round() as u32, burst.time().as_nanos() as u64));
        Self {
            group: group.clone(),
            operations: rates([iops, iops_read, iops_write]),
            bytes: rates([bps, bps_read, bps_write]),
            burst,
        }
    }
}

impl Limits {
    /// The limits to put in force.
    ///
    /// # Errors
    /// A burst that makes no sense.
    pub fn throttle(self) -> Result<DiskThrottle> {
        let rates = |rates: [Option<u64>; 3]| rates.map(|rate| rate.and_then(NonZeroU64::new));
        let [iops, iops_read, iops_write] = rates(self.operations);
        let [bps, bps_read, bps_write] = rates(self.bytes);
        let burst = self.burst.map(|(percent, nanoseconds)| {
            Burst::new(f64::from(percent) / 100.0, Duration::from_nanos(nanoseconds))
        });
        let burst = burst.transpose().map_err(|why| anyhow!(why))?;
        let limits = RateLimits { iops, iops_read, iops_write, bps, bps_read, bps_write, burst };
        Ok(DiskThrottle { group: self.group, limits })
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

impl From<&ConfiguredDisk> for Configured {
    fn from(disk: &ConfiguredDisk) -> Self {
        let exports = disk.addresses.iter().map(Export::from).collect();
        Self { opened: Opened::from(&disk.setup), exports }
    }
}

impl Configured {
    /// The disk to be open.
    ///
    /// # Errors
    /// A word that this version does not know.
    pub fn disk(self) -> Result<ConfiguredDisk> {
        let address = |export| match export {
            Export::Nbd(uri) => {
                let uri = uri.parse().with_context(|| format!("no URI: {uri}"))?;
                Ok(ExportAddress::Nbd(uri))
            }
            Export::VhostUser(path) => Ok(ExportAddress::VhostUser(path_of(path))),
            Export::Ublk(id) => Ok(ExportAddress::Ublk(id)),
        };
        let addresses = self.exports.into_iter().map(address).collect::<Result<_>>()?;
        Ok(ConfiguredDisk { setup: self.opened.setup()?, addresses })
    }
}
