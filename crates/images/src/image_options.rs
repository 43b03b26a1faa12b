//! How an image on the host is opened: format, access, cache mode, lock.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use blockhouse_core::Durability;
use blockhouse_disk::{
    Access, BitmapActivity, BlockSizes, DetectZeroes, Discard, FlushPolicy, OnFull, Options,
    StateDir,
};
use blockhouse_engine::{OpenMode, PageCache};
use blockhouse_format::ImageFormat;
use serde_json::json;

use crate::allowed_paths::AllowedPaths;
use crate::unlock::Secrets;

/// QEMU's cache modes: presets of page cache, default durability and flushes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheMode {
    /// Direct I/O; the guest flushes.
    #[default]
    None,
    /// Through the page cache; the guest flushes.
    Writeback,
    /// Through the page cache; every write is durable.
    Writethrough,
    /// Direct I/O; every write is durable.
    Directsync,
    /// Through the page cache; nothing is ever flushed.
    Unsafe,
}

impl CacheMode {
    /// All modes, in the order in which they are listed to users.
    pub const ALL: [Self; 5] =
        [Self::None, Self::Writeback, Self::Writethrough, Self::Directsync, Self::Unsafe];

    /// The name on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Writeback => "writeback",
            Self::Writethrough => "writethrough",
            Self::Directsync => "directsync",
            Self::Unsafe => "unsafe",
        }
    }

    /// The same mode, but with every write durable; `Unsafe` stays as it is.
    #[must_use]
    pub fn write_through(self) -> Self {
        match self {
            Self::None => Self::Directsync,
            Self::Writeback => Self::Writethrough,
            Self::Writethrough | Self::Directsync | Self::Unsafe => self,
        }
    }

    pub(crate) fn page_cache(self) -> PageCache {
        match self {
            Self::None | Self::Directsync => PageCache::Bypassed,
            Self::Writeback | Self::Writethrough | Self::Unsafe => PageCache::Used,
        }
    }

    pub(crate) fn durability(self) -> Durability {
        match self {
            Self::Writethrough | Self::Directsync => Durability::Data,
            Self::None | Self::Writeback | Self::Unsafe => Durability::None,
        }
    }

    pub(crate) fn flush(self) -> FlushPolicy {
        match self {
            Self::Unsafe => FlushPolicy::Ignore,
            _ => FlushPolicy::Honor,
        }
    }
}

impl FromStr for CacheMode {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|mode| mode.as_str() == name);
        found.ok_or_else(|| {
            let names = Self::ALL.map(Self::as_str).join(", ");
            format!("there is no cache mode '{name}'; use one of {names}")
        })
    }
}

/// Whether acknowledged changes survive the process. See docs/durability.md.
///
/// Used for images that are opened for writing and locked. Opening for reading only is refused if
/// acknowledged changes are missing, because a copy would silently lack them.
#[derive(Clone, Debug, Default)]
pub enum StateUse {
    /// Acknowledged changes do not survive, and no state of another process is looked for.
    #[default]
    Off,
    /// As `Off`, but warns of changes that a dead server has left in the directory: for commands
    /// that inspect an image and copy nothing of it. `None` if there is no such directory.
    Look(Option<StateDir>),
    /// The state that a dead server has left in the directory is replayed to the image. For tools:
    /// without such a state they keep none of their own, and they do not change an image whose
    /// server left its state elsewhere. `None` if there is no such directory.
    Replay(Option<StateDir>),
    /// As `Replay`, and the image has a state file in the directory until it is closed. For
    /// servers. If the file cannot be made, opening fails.
    Keep(StateDir),
    /// As `Keep`, but if the file cannot be made, opening warns and continues.
    TryKeep(StateDir),
}

impl StateUse {
    /// The directory in which state is looked for.
    pub fn directory(&self) -> Option<&StateDir> {
        match self {
            Self::Off => None,
            Self::Look(dir) | Self::Replay(dir) => dir.as_ref(),
            Self::Keep(dir) | Self::TryKeep(dir) => Some(dir),
        }
    }

    /// Whether the image is only inspected.
    pub(crate) fn is_look(&self) -> bool {
        matches!(self, Self::Look(_))
    }
}

/// How an image is opened.
#[derive(Clone, Debug)]
pub struct ImageOptions {
    /// The format; `None` chooses it by the name.
    pub format: Option<ImageFormat>,
    /// Whether the format of an NBD export is probed if `format` is `None`. An image whose format
    /// was found by the probe may name only the allowed paths.
    pub probes_exports: bool,
    /// Whether the image may be changed.
    pub access: Access,
    /// How the host's page cache is used.
    pub cache: CacheMode,
    /// The effect of discards.
    pub discard: Discard,
    /// The treatment of writes of zeros.
    pub detect_zeroes: DetectZeroes,
    /// Whether writes of whole clusters are stored in compressed form, where that saves space.
    pub compress: bool,
    /// Whether data read from the backing file is copied into the image, if the image may be
    /// changed.
    pub copy_on_read: bool,
    /// The block sizes that the disk announces.
    pub block_sizes: BlockSizes,
    /// The treatment of changes that get ENOSPC.
    pub on_full: OnFull,
    /// Whether the image is locked against other programs.
    pub locking: Locking,
    /// Whether acknowledged changes survive the process.
    pub state: StateUse,
    /// The files that the image may name as its backing file or data file, in addition to regular
    /// files below the image's own folder.
    pub allowed_paths: AllowedPaths,
    /// Whether the image may name an image on another server as its backing file.
    pub remote_backing: RemoteBacking,
    /// The secrets of encrypted images.
    pub secrets: Secrets,
    /// The part of the file that has the image; `None` for the whole file. A part cannot be
    /// resized.
    pub part: Option<FilePart>,
    /// The purpose of opening the image.
    pub purpose: Purpose,
    /// The name or id of the snapshot to open, for reading only.
    pub snapshot: Option<String>,
    /// Whether the image's backing file is opened.
    pub backing_use: BackingUse,
    /// Location of a raw image's bitmaps, if not beside it.
    pub side_file: Option<SideFile>,
    /// The data file of a qcow2 image, in place of the one that the image names. It is not used for
    /// backing files.
    pub data_file: Option<PathBuf>,
}

/// The purpose of opening an image, which decides which of its files and which keys are needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Purpose {
    /// To read and write its disk: with all files.
    #[default]
    Disk,
    /// To find the images of its chain: an encrypted image is opened without a key, too, but then
    /// its data cannot be read.
    Chain,
    /// To work on the image itself: with its data file, without its backing files. Ranges of the
    /// backing files cannot be read; encrypted data can be read only with a key.
    Image,
    /// To inspect it, for reading only: with the files that hold its metadata. No guest data of an
    /// image with a data file can be read.
    Metadata,
}

/// The treatment of the backing file that an image names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackingUse {
    /// The backing file is opened.
    #[default]
    Followed,
    /// The backing file is left out: unallocated ranges read as zeros, and block status
    /// distinguishes them from data.
    LeftOut,
}

/// The suffix of a side file's name.
pub(crate) const SIDE_FILE_SUFFIX: &str = ".bitmaps";

/// The path of an image's side file if it is beside the image.
pub(crate) fn side_file_of(image: &Path) -> PathBuf {
    let mut name = image.as_os_str().to_owned();
    name.push(SIDE_FILE_SUFFIX);
    name.into()
}

/// Location of the bitmaps of a raw image or volume, if they are not beside it. A raw image cannot
/// store bitmaps itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SideFile {
    /// The file, or a folder in which it is named after the image.
    pub path: PathBuf,
    /// Whether the user asserts that the volume has no other writer. The assertion counts only if
    /// the host cannot tell whether the volume has changed.
    pub is_alone: bool,
}

/// A part of a file: a disk in an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilePart {
    /// The offset in the file, in bytes.
    pub offset: u64,
    /// The length in bytes; `None`: up to the end.
    pub size: Option<u64>,
}

impl FilePart {
    /// The name, in QEMU's syntax, of the image of this format in this part of a file.
    ///
    /// # Errors
    /// The path is not UTF-8.
    pub fn name_of(self, file: &Path, format: ImageFormat) -> Result<String, String> {
        let Some(path) = file.to_str() else {
            return Err(format!("{}: the name must be UTF-8", file.display()));
        };
        let file = json!({ "driver": "file", "filename": path });
        let mut part = json!({ "driver": "raw", "offset": self.offset, "file": file });
        if let Some(size) = self.size {
            part["size"] = size.into();
        }
        let name = match format {
            ImageFormat::Raw => part,
            format => json!({ "driver": format.as_str(), "file": part }),
        };
        Ok(format!("json:{name}"))
    }
}

/// Whether an image may name an image on another server as its backing file. Reason to refuse: an
/// attacker's image could make this host connect to servers that the attacker cannot reach.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RemoteBacking {
    /// An image may not name one.
    #[default]
    Refused,
    /// An image may name one, by an NBD URI or the name of an image in Ceph.
    Allowed,
}

impl ImageOptions {
    /// The same options for an image in this part of its file. A part is read through the page
    /// cache, because it may begin at any offset.
    #[must_use]
    pub fn in_part(self, part: Option<FilePart>) -> Self {
        let cache = if part.is_some() { CacheMode::Writeback } else { self.cache };
        Self { part, cache, ..self }
    }

    /// The same options for another purpose.
    #[must_use]
    pub fn for_purpose(self, purpose: Purpose) -> Self {
        Self { purpose, ..self }
    }

    /// The same options for reading a snapshot of the disk, if `snapshot` is given.
    #[must_use]
    pub fn at_snapshot(self, snapshot: Option<&str>) -> Self {
        match snapshot {
            Some(name) => {
                Self { access: Access::ReadOnly, snapshot: Some(name.to_owned()), ..self }
            }
            None => self,
        }
    }

    /// The options of the disk.
    pub(crate) fn of_disk(&self) -> Options {
        Options {
            access: self.access,
            durability: self.cache.durability(),
            flush: self.cache.flush(),
            discard: self.discard,
            detect_zeroes: self.detect_zeroes,
            compress: self.compress,
            copy_on_read: self.copy_on_read,
            bitmap_activity: BitmapActivity::default(),
            block_sizes: self.block_sizes,
            on_full: self.on_full,
            is_inactive: self.locking == Locking::Inactive,
        }
    }

    pub(crate) fn open_mode(&self) -> OpenMode {
        match self.access {
            Access::ReadOnly => OpenMode::ReadOnly,
            Access::ReadWrite => OpenMode::ReadWrite,
        }
    }
}

impl Default for ImageOptions {
    /// The format by the name, read and write, direct I/O, discards passed on, zeros written,
    /// locked, no state, no allowed paths, no secrets, bitmaps beside it.
    fn default() -> Self {
        Self {
            format: None,
            probes_exports: false,
            access: Access::ReadWrite,
            cache: CacheMode::None,
            discard: Discard::Unmap,
            detect_zeroes: DetectZeroes::Off,
            compress: false,
            copy_on_read: false,
            block_sizes: BlockSizes::OF_IMAGE,
            on_full: OnFull::Report,
            locking: Locking::Held,
            state: StateUse::Off,
            allowed_paths: AllowedPaths::default(),
            remote_backing: RemoteBacking::Refused,
            secrets: Secrets::default(),
            part: None,
            purpose: Purpose::Disk,
            snapshot: None,
            backing_use: BackingUse::Followed,
            side_file: None,
            data_file: None,
        }
    }
}

/// Whether an image is locked while it is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Locking {
    /// The image is locked as long as it is open.
    Held,
    /// The image is not locked: for a quick look at an image that others may be using.
    None,
    /// The image is not locked until it is opened again ([`reopen`](crate::reopen)). Until then
    /// another program may change it, and this program only reads it.
    Inactive,
}
