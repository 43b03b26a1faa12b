//! Opening an image on the host: which format, which cache mode, which lock.
//!
//! A format is never guessed from an image's content: a guest writes what it likes to the start of a
//! raw disk. The file's name decides unless the caller does, and an image that is opened as raw but
//! looks like something else is refused.

use std::path::Path;
use std::str::FromStr;

use blockhouse_core::{Durability, Error, ErrorKind, Result, Storage};
use blockhouse_engine::{HostFile, OpenFor, PageCache};
use blockhouse_format::probe;

use crate::lock::lock;
use crate::{Access, Discard, Disk, FlushPolicy, Options};

/// The image formats that can be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageFormat {
    /// The disk byte for byte.
    Raw,
}

impl FromStr for ImageFormat {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "raw" => Ok(Self::Raw),
            "qcow2" => Err("qcow2 images cannot be opened by this version".into()),
            _ => Err(format!("there is no format '{name}'; this version opens raw images")),
        }
    }
}

impl ImageFormat {
    /// The format that a file's name stands for: `.qcow2`, otherwise raw.
    ///
    /// # Errors
    /// `Unsupported` for a name that stands for a format which this version does not open.
    pub fn by_name(path: &Path) -> Result<Self> {
        let suffix = path.extension().unwrap_or_default();
        if suffix != "qcow2" {
            return Ok(Self::Raw);
        }
        Err(Error::new(ErrorKind::Unsupported, "qcow2 images cannot be opened by this version")
            .on(&path.display().to_string())
            .hint("if it is a raw image in spite of its name, say --format raw"))
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

    fn page_cache(self) -> PageCache {
        match self {
            Self::None | Self::Directsync => PageCache::Bypassed,
            Self::Writeback | Self::Writethrough | Self::Unsafe => PageCache::Used,
        }
    }

    fn durability(self) -> Durability {
        match self {
            Self::Writethrough | Self::Directsync => Durability::Data,
            Self::None | Self::Writeback | Self::Unsafe => Durability::None,
        }
    }

    fn flush(self) -> FlushPolicy {
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

/// Opens an image and locks it. Needs the loop of the current thread.
///
/// # Errors
/// One that names the file: it is missing, no disk image, of a wrong size, locked, looks like
/// another format, or the host refuses.
pub async fn open(path: &Path, options: ImageOptions) -> Result<Disk<HostFile>> {
    let format = options.format.map_or_else(|| ImageFormat::by_name(path), Ok)?;
    let access = match options.access {
        Access::ReadOnly => OpenFor::Reading,
        Access::ReadWrite => OpenFor::Writing,
    };
    let file = HostFile::open(path, access, options.cache.page_cache())?;
    if options.locking == Locking::Held {
        lock(&file, options.access)?;
    }
    let disk_options = Options {
        access: options.access,
        durability: options.cache.durability(),
        flush: options.cache.flush(),
        discard: options.discard,
    };
    match format {
        ImageFormat::Raw => {
            refuse_disguise(&file, options.format).await?;
            Disk::raw(file, disk_options)
        }
    }
}

/// Makes a new raw image of `size` bytes, all holes, durably. Needs the loop of the current thread.
///
/// # Errors
/// One that names the file: the size is no multiple of 512, the file exists, or the host refuses.
/// A file that could not be finished is removed.
pub async fn create(path: &Path, size: u64) -> Result<()> {
    let file = HostFile::create(path, size, PageCache::Used)?;
    let finish = async {
        Disk::raw(file, Options::default())?.resize(size).await?;
        sync_folder(path)
    };
    finish.await.inspect_err(|_| {
        // The error that counts is the first one.
        let _ = std::fs::remove_file(path);
    })
}

/// Makes the new name durable.
fn sync_folder(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    let synced = std::fs::File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(|error| Error::host("cannot sync", error).on(&folder.display().to_string()))
}

async fn refuse_disguise(file: &HostFile, asked: Option<ImageFormat>) -> Result<()> {
    // Whoever says --format raw means it.
    if asked.is_some() {
        return Ok(());
    }
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
