//! Description of a disk in the configuration and in `disk.open`, with the same words as on the
//! command line. Served, reloaded and handed-over disks have the same description.

use std::path::PathBuf;

use blockhouse_disk::{Access, BlockSizes, DetectZeroes, Discard, ImageFormat, OnFull};
use blockhouse_images::{BackingUse, CacheMode, FilePart, KeyFiles, RemoteBacking, SideFile};
use blockhouse_nbd::MAX_EXPORT_BITMAPS;
use blockhouse_storage::Location;
use schemars::JsonSchema;
use serde::Deserialize;

use crate::export_address::ExportAddress;
use crate::limits::LimitsConfig;
use crate::text_fields::{
    Size, check_absolute, check_image_name, repeated, some_size, some_text, text, texts,
};
use crate::threshold::Threshold;

/// A disk to be opened.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct DiskConfig {
    /// The disk's name, which no other disk may have. Left out: the name of the image's file.
    pub name: Option<String>,
    /// The image: an absolute path, or an address on another server (nbd://..., rbd:...).
    pub path: PathBuf,
    /// raw, qcow2, or a format that is only read (docs/formats.md). Left out, the file's name
    /// decides (.qcow2, .vmdk and so on, otherwise raw).
    #[serde(default, deserialize_with = "some_text")]
    #[schemars(with = "Option<String>")]
    pub format: Option<ImageFormat>,
    /// Refuse all writes.
    #[serde(default)]
    pub read_only: bool,
    /// The host's cache: none, writeback, writethrough, directsync or unsafe. Left out: none.
    #[serde(default, deserialize_with = "text")]
    #[schemars(with = "Option<String>")]
    pub cache: CacheMode,
    /// The effect of a guest's discards: unmap gives the space back to the host, ignore does
    /// nothing. Left out: unmap.
    #[serde(default)]
    pub discard: Discard,
    /// The treatment of writes of zeros: off, on or unmap. Left out: off.
    #[serde(default)]
    pub detect_zeroes: DetectZeroes,
    /// Bytes of a sector, 512 to 4096. Partition tables count in sectors. Left out: as the image
    /// says (VHDX), otherwise 512.
    #[serde(default, deserialize_with = "some_size")]
    #[schemars(with = "Option<Size>")]
    pub logical_block_size: Option<u64>,
    /// The physical block size in bytes: the best unit for guests' writes. Left out: that of the
    /// host.
    #[serde(default, deserialize_with = "some_size")]
    #[schemars(with = "Option<Size>")]
    pub physical_block_size: Option<u64>,
    /// The discard granularity that guests see, in bytes. Left out: a cluster, at least 64 KiB.
    #[serde(default, deserialize_with = "some_size")]
    #[schemars(with = "Option<Size>")]
    pub discard_granularity: Option<u64>,
    /// The treatment of writes for which the host has no space: report fails them with ENOSPC, hold
    /// makes them wait for space. Left out: report.
    #[serde(default)]
    pub on_full: OnFullName,
    /// With on-full hold: the maximum seconds that a write waits before it fails. Left out: 300.
    pub hold_seconds: Option<u32>,
    /// The threshold: the event disk.threshold reports less free space on the host. Bytes, as a
    /// text like "10G", or "10%" of all space. Left out: no event.
    #[serde(default, deserialize_with = "some_text")]
    #[schemars(with = "Option<String>")]
    pub threshold: Option<Threshold>,
    /// Whether data that is read from the backing file is stored in the image, so that each cluster
    /// is fetched once.
    #[serde(default)]
    pub copy_on_read: bool,
    /// Copy the backing file's data into the image in the background, at this many bytes a second
    /// (0: no limit). Then detach the backing file: the job `stream`. Left out: no copy.
    #[serde(default, deserialize_with = "some_size")]
    #[schemars(with = "Option<Size>")]
    pub prefetch: Option<u64>,
    /// Serve the disk as it was when this snapshot was taken (its name or id), for reading only.
    pub snapshot: Option<String>,
    /// Make the image with this size if it is missing: bytes, or a text like "20G".
    #[serde(default, deserialize_with = "some_size")]
    #[schemars(with = "Option<Size>")]
    pub create: Option<u64>,
    /// The files that the image may name as its backing file or data file, beside regular files
    /// below its own folder: folders and files, by absolute paths.
    #[serde(default)]
    pub allow_paths: Vec<PathBuf>,
    /// Whether the image may name an export of another server as its backing file.
    #[serde(default)]
    pub allow_remote: bool,
    /// Whether the image may name only the allowed paths. An image with another backing file, data
    /// file or extent is refused.
    #[serde(default)]
    pub no_references: bool,
    /// Whether the image is opened without its backing file: unallocated clusters read as zeros.
    #[serde(default)]
    pub without_backing: bool,
    /// The data file of a qcow2 image with an external one, in place of the file that the image
    /// names: an absolute path, or an address.
    pub data_file: Option<PathBuf>,
    /// Files whose bytes are the key of an encrypted image, by absolute paths. Each is tried on
    /// each image of the chain.
    #[serde(default)]
    pub key_files: Vec<PathBuf>,
    /// Files whose first line is the passphrase of an encrypted image, by absolute paths.
    #[serde(default)]
    pub passphrase_files: Vec<PathBuf>,
    /// Persistent bitmaps of the image that NBD clients may ask for (qemu:dirty-bitmap:NAME), by
    /// their names.
    #[serde(default)]
    pub bitmaps: Vec<String>,
    /// The absolute path of the file with a raw image's bitmaps, or of a folder for a file named
    /// after the image. Left out: beside the image.
    pub bitmaps_in: Option<PathBuf>,
    /// Whether these bitmaps are used even if it is unknown whether another program has written to
    /// the image.
    #[serde(default)]
    pub trust_bitmaps: bool,
    /// The rate limits. Left out: no limits.
    #[serde(default)]
    pub limits: LimitsConfig,
    /// The addresses at which it is served: URIs of NBD exports, absolute paths of vhost-user-blk
    /// sockets; in a configuration also ublk devices (/dev/ublkb0).
    #[serde(default, deserialize_with = "texts")]
    #[schemars(with = "Vec<String>", extend("default" = []))]
    pub exports: Vec<ExportAddress>,
    /// Whether bitmaps missing from the image are looked up in its backing files.
    #[serde(skip)]
    pub bitmaps_behind: bool,
    /// Whether the image is opened for reading only and without a lock, until it is made active.
    #[serde(skip)]
    pub is_inactive: bool,
    /// Whether writes of whole clusters are stored in compressed form, where that saves space.
    #[serde(skip)]
    pub compress: bool,
    /// The part of the file that the disk consists of.
    #[serde(skip)]
    pub part: Option<FilePart>,
}

/// Refuses to fill a read-only disk from its backing file.
///
/// # Errors
/// A text that describes the contradiction.
pub fn check_filling(
    copy_on_read: bool,
    prefetch: Option<u64>,
    is_read_only: bool,
) -> Result<(), String> {
    if (copy_on_read || prefetch.is_some()) && is_read_only {
        Err("copy-on-read and prefetch write to the image: leave read-only and snapshot out, or these".into())
    } else {
        Ok(())
    }
}

/// The treatment of writes for which the host has no space.
#[derive(Clone, Copy, Debug, Default, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum OnFullName {
    /// Writes fail.
    #[default]
    Report,
    /// Writes wait.
    Hold,
}

impl OnFullName {
    /// The word for this treatment.
    pub fn of(on_full: OnFull) -> Self {
        match on_full {
            OnFull::Report => Self::Report,
            OnFull::Hold(_) => Self::Hold,
        }
    }
}

impl DiskConfig {
    /// The description in normalized form: with the disk's name, a size of whole sectors, and the
    /// time for which writes are held.
    ///
    /// # Errors
    /// A text that describes the contradiction.
    pub fn checked(self) -> Result<Self, String> {
        self.images().try_for_each(|path| check_image_name(path))?;
        let named = self.allow_paths.iter().chain(&self.key_files).chain(&self.passphrase_files);
        named.chain(&self.bitmaps_in).try_for_each(|path| check_absolute(path))?;
        if self.trust_bitmaps && self.bitmaps_in.is_none() {
            return Err("trust-bitmaps needs bitmaps-in".into());
        }
        let name = self.name.clone().or_else(|| Location::label(&self.path));
        if name.as_deref().unwrap_or_default().is_empty() {
            return Err("the disk has no name, and its path names no file".into());
        }
        if self.detect_zeroes == DetectZeroes::Unmap && self.discard == Discard::Ignore {
            return Err(
                "detect-zeroes unmap needs discard unmap; detect-zeroes on does without".into()
            );
        }
        if self.create.is_some() && self.snapshot.is_some() {
            return Err("a new image has no snapshots; leave out create or snapshot".into());
        }
        if self.no_references && self.allow_remote {
            return Err(
                "no-references follows no name of a server; leave allow-remote out, or it".into()
            );
        }
        check_filling(self.copy_on_read, self.prefetch, self.is_read_only())?;
        check_bitmaps(&self.bitmaps, self.snapshot.as_deref())?;
        self.block_sizes()?;
        self.limits.check()?;
        Ok(Self {
            name,
            hold_seconds: self.on_full()?.seconds(),
            create: self.create.map(|size| size.next_multiple_of(512)),
            ..self
        })
    }

    /// The disk's unique name.
    pub fn name(&self) -> &str {
        self.name.as_deref().unwrap_or_default()
    }

    /// The names of the image, and of the data file that the user gives it.
    pub fn images(&self) -> impl Iterator<Item = &PathBuf> {
        [&self.path].into_iter().chain(&self.data_file)
    }

    /// The description of the same disk after a job has moved it to another image.
    #[must_use]
    pub fn moved_to(self, path: PathBuf, format: ImageFormat, cache: CacheMode) -> Self {
        Self { path, format: Some(format), cache, data_file: None, ..self }
    }

    /// The access that `read-only` allows. A disk at a snapshot is read-only in any case.
    pub fn access(&self) -> Access {
        if self.read_only { Access::ReadOnly } else { Access::ReadWrite }
    }

    /// Whether the disk cannot be changed: it is read-only or a snapshot.
    pub fn is_read_only(&self) -> bool {
        self.read_only || self.snapshot.is_some()
    }

    /// The block sizes that the disk announces.
    ///
    /// # Errors
    /// A text that says why no disk has such sizes.
    pub fn block_sizes(&self) -> Result<BlockSizes, String> {
        BlockSizes::new(self.logical_block_size, self.physical_block_size, self.discard_granularity)
    }

    /// The treatment of changes for which the host has no space.
    ///
    /// # Errors
    /// A text that describes the mistake.
    pub fn on_full(&self) -> Result<OnFull, String> {
        OnFull::new(self.on_full == OnFullName::Hold, self.hold_seconds)
    }

    /// Whether the backing file is read.
    pub fn backing_use(&self) -> BackingUse {
        if self.without_backing { BackingUse::LeftOut } else { BackingUse::Followed }
    }

    /// Whether the image may name exports of other servers.
    pub fn remote_backing(&self) -> RemoteBacking {
        if self.allow_remote { RemoteBacking::Allowed } else { RemoteBacking::Refused }
    }

    /// The keys of the disk's encrypted images.
    pub fn keys(&self) -> KeyFiles {
        KeyFiles { keys: self.key_files.clone(), passphrases: self.passphrase_files.clone() }
    }

    /// The side file that `bitmaps-in` names, if it is given.
    pub fn side_file(&self) -> Option<SideFile> {
        let path = self.bitmaps_in.clone()?;
        Some(SideFile { path, is_alone: self.trust_bitmaps })
    }

    /// Whether a disk opened with this description can stay open for `other`: the two may differ
    /// only in limits, thresholds, exports, and the size of a new image.
    pub fn opens_like(&self, other: &Self) -> bool {
        let image = |disk: &Self| Self {
            limits: LimitsConfig::default(),
            threshold: None,
            exports: Vec::new(),
            create: None,
            ..disk.clone()
        };
        image(self) == image(other)
    }
}

/// Refuses bitmaps that cannot be offered to NBD clients.
///
/// # Errors
/// There are too many, one is named twice, or a snapshot is served.
pub fn check_bitmaps(bitmaps: &[String], snapshot: Option<&str>) -> Result<(), String> {
    if !bitmaps.is_empty() && snapshot.is_some() {
        return Err("bitmaps tell of the disk and not of a snapshot; leave out one of them".into());
    }
    if bitmaps.len() > MAX_EXPORT_BITMAPS {
        let count = bitmaps.len();
        return Err(format!("{count} bitmaps are more than an export has ({MAX_EXPORT_BITMAPS})"));
    }
    match repeated(bitmaps) {
        Some(name) => Err(format!("the bitmap '{name}' is named twice; name it once")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(json: &str) -> Result<DiskConfig, String> {
        let config: DiskConfig = serde_json::from_str(json).map_err(|error| error.to_string())?;
        config.checked()
    }

    #[test]
    fn a_disk_is_described_in_the_words_of_the_command_line() {
        let disk = options(r#"{"path":"/vm/a.qcow2"}"#).expect("a path is enough");
        assert_eq!((disk.name(), disk.cache, disk.create), ("a.qcow2", CacheMode::None, None));
        let disk = options(
            r#"{"path":"/a","name":"n","format":"raw","read-only":true,"cache":"unsafe","create":"1.5K"}"#,
        );
        let disk = disk.expect("all of it makes sense");
        assert!(disk.is_read_only() && disk.format == Some(ImageFormat::Raw));
        assert_eq!((disk.name(), disk.cache, disk.create), ("n", CacheMode::Unsafe, Some(1536)));
    }

    #[test]
    fn writes_that_find_no_room_are_held_for_five_minutes_or_as_long_as_is_said() {
        let on_full = |json| options(json).and_then(|disk| disk.on_full()).expect("it makes sense");
        let hold = |seconds| OnFull::Hold(std::time::Duration::from_secs(seconds));
        assert_eq!(on_full(r#"{"path":"/a"}"#), OnFull::Report);
        assert_eq!(on_full(r#"{"path":"/a","on-full":"report"}"#), OnFull::Report);
        assert_eq!(on_full(r#"{"path":"/a","on-full":"hold"}"#), hold(300));
        assert_eq!(on_full(r#"{"path":"/a","on-full":"hold","hold-seconds":7}"#), hold(7));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (json, why) in [
            (r#"{}"#, "path"),
            (r#"{"path":"a"}"#, "whole path"),
            (r#"{"path":"/"}"#, "no name"),
            (r#"{"path":"/a","name":""}"#, "no name"),
            (r#"{"path":"/a","cache":"some"}"#, "no cache mode 'some'"),
            (r#"{"path":"/a","format":"vmx"}"#, "vmx"),
            (r#"{"path":"/a","create":-1}"#, "negative"),
            (r#"{"path":"/a","create":"1Q"}"#, "no unit"),
            (r#"{"path":"/a","create":18446744073709551615}"#, "too large"),
            (r#"{"path":"/a","detect-zeroes":"unmap","discard":"ignore"}"#, "needs discard unmap"),
            (r#"{"path":"/a","create":1,"snapshot":"s"}"#, "no snapshots"),
            (r#"{"path":"/a","logical-block-size":"8K"}"#, "from 512 to 4096"),
            (r#"{"path":"/a","no-references":true,"allow-remote":true}"#, "follows no name"),
            (r#"{"path":"/a","bitmaps":["b"],"snapshot":"s"}"#, "not of a snapshot"),
            (r#"{"path":"/a","bitmaps":["b","c","b"]}"#, "'b' is named twice"),
            (r#"{"path":"/a","on-full":"hold","hold-seconds":0}"#, "holds nothing"),
            (r#"{"path":"/a","hold-seconds":5}"#, "needs on-full hold"),
            (r#"{"path":"/a","on-full":"stop"}"#, "stop"),
            (r#"{"path":"/a","bitmaps-in":"b"}"#, "whole path"),
            (r#"{"path":"/a","trust-bitmaps":true}"#, "needs bitmaps-in"),
            (r#"{"path":"/a","read_only":true}"#, "unknown field"),
        ] {
            let error = options(json).expect_err(json);
            assert!(error.contains(why), "{json}: {error}");
        }
    }
}
