//! How an image on the host is opened: which format, which cache mode, which lock; and new images.
//!
//! A format is never guessed from an image's content: a guest writes what it likes to the start of a
//! raw disk. The file's name decides unless the caller does, and an image that is opened as raw but
//! looks like something else is refused.

use std::path::Path;
use std::str::FromStr;

use blockhouse_core::{Durability, Error, ErrorKind, Result, Storage, Sync};
use blockhouse_engine::{HostFile, PageCache};
use blockhouse_format::{probe, qcow2};

use crate::publish::sync_folder;
use crate::{Access, DetectZeroes, Discard, Disk, FlushPolicy, Options};

/// The image formats that can be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFormat {
    /// The disk byte for byte.
    Raw,
    /// QEMU's format: clusters that tables say the place of.
    Qcow2,
}

impl FromStr for ImageFormat {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "raw" => Ok(Self::Raw),
            "qcow2" => Ok(Self::Qcow2),
            _ => Err(format!("there is no format '{name}'; this version opens raw and qcow2")),
        }
    }
}

impl ImageFormat {
    /// The name on the command line and in images.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }

    /// The format that a file's name stands for: `.qcow2`, otherwise raw.
    pub fn by_name(path: &Path) -> Self {
        match path.extension() {
            Some(suffix) if suffix == "qcow2" => Self::Qcow2,
            _ => Self::Raw,
        }
    }
}

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
    /// All of them, as listed to users.
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
            _ => FlushPolicy::Obey,
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

/// How an image is opened.
#[derive(Clone, Copy, Debug)]
pub struct ImageOptions {
    /// Its format; `None` goes by the name.
    pub format: Option<ImageFormat>,
    /// Whether it may be changed.
    pub access: Access,
    /// How the host's page cache is used.
    pub cache: CacheMode,
    /// What becomes of discards.
    pub discard: Discard,
    /// What becomes of writes of zeros.
    pub detect_zeroes: DetectZeroes,
    /// Whether other programs are kept away.
    pub locking: Locking,
}

/// Whether an image is locked while it is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Locking {
    /// As long as it is open.
    Held,
    /// Not at all: for a quick look at an image that others may be using.
    None,
}

/// Makes a new image of `size` bytes, all holes, durably. Needs the loop of the current thread.
///
/// # Errors
/// One that names the file: the size is no multiple of 512, the file exists, or the host refuses.
/// A file that could not be finished is removed.
pub async fn create(path: &Path, size: u64, format: ImageFormat) -> Result<()> {
    let file_size = match format {
        ImageFormat::Raw => size,
        ImageFormat::Qcow2 => 0,
    };
    let file = HostFile::create(path, file_size, PageCache::Used)?;
    let finish = async {
        match format {
            ImageFormat::Raw => Disk::raw(file, Options::default())?.resize(size).await?,
            ImageFormat::Qcow2 => {
                qcow2::create(&file, &qcow2::CreateOptions::new(size)).await?;
                file.flush(Sync::Full).await?;
            }
        }
        sync_folder(path)
    };
    finish.await.inspect_err(|_| {
        // The error that counts is the first one.
        let _ = std::fs::remove_file(path);
    })
}

/// Refuses a file that would be qcow2 by its name only.
pub(crate) async fn refuse_missing_magic(file: &HostFile) -> Result<()> {
    if probe::probe(file).await? == Some("qcow2") {
        return Ok(());
    }
    let what = "is no qcow2 image in spite of its name";
    Err(Error::new(ErrorKind::InvalidInput, what)
        .on(file.name())
        .hint("if it is a raw image, say --format raw"))
}

/// Refuses a file that would be raw but looks like something else.
pub(crate) async fn refuse_disguise(file: &HostFile) -> Result<()> {
    match probe::probe(file).await? {
        None => Ok(()),
        Some(name) => {
            let what = format!("would be opened as a raw image but looks like {name}");
            Err(Error::new(ErrorKind::InvalidInput, what)
                .on(file.name())
                .hint("if it really is raw, say --format raw"))
        }
    }
}
